"""FlashAttention for mma.sync in Gluon: cards with tensor cores, but without Hopper's (Ampere, Ada,
RTX Blackwell).

Equations, letters and masks are those of portable.py; compare FlashAttention-2 (arXiv 2307.08691).
Triton's compiler keeps the operands of a loop in registers, and they spill. Here each is read from
shared memory at its use: only sums, scores and p stay in registers.

Forward: a program owns BM queries. K of the next tile loads during softmax and p·v, v during q·k;
two programs of a multiprocessor cover what is left.

Backward: a program owns BN keys of one key-value head and goes over the queries that see them, for
all query heads of the group. It makes five products where portable.py's two kernels make seven:

    s = q·kᵀ,  dp = do·vᵀ,  dv += pᵀ·do,  dk += dsᵀ·q,  dq = ds·k, added to fp32 sums atomically

p and ds go through shared memory, since their products need them transposed, or by other warps. The
sums of dq lie in the order of registers: a warp adds 128 bytes side by side. The last kernel sorts,
scales and rounds them. They add up in any order: dq may differ in its last bits from run to run.

Heads of 96 have two parts, 64 + 32 channels: tiles have sides that are powers of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from longctx.kernels.attention import Gradients, Intervals, Saved, Scores
from longctx.kernels.attention.hopper_primitives import part_buffers, split
from longctx.kernels.attention.portable import (
    LENGTHS,
    LN2,
    LOG2E,
    ROW,
    batch_stride,
    bias_or,
    biased,
    heads_in_l2,
    preprocess,
    scheduled_tile,
    sinks_or,
    softcapped,
    visible_tiles,
    with_sink,
)

# Gluon of Triton 3.9 renamed it
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


class AmpereConfig(NamedTuple):
    """BM queries and BN keys of a tile, warps of a program.

    Of the backward's warps S_ROWS share the queries of a tile of scores, KV_ROWS the keys of dk and
    dv; the others share columns. STAGES: slots of q.
    """

    BM: int
    BN: int
    warps: int
    S_ROWS: int = 1
    KV_ROWS: int = 1
    STAGES: int = 1


# by KiB of shared memory that a program may have, then by head size
FORWARD = {
    163: {
        64: AmpereConfig(128, 128, 4),
        96: AmpereConfig(128, 64, 4),
        128: AmpereConfig(128, 64, 4),
        256: AmpereConfig(128, 64, 8),
    },
    99: {
        64: AmpereConfig(128, 128, 4),
        96: AmpereConfig(64, 64, 4),
        128: AmpereConfig(64, 64, 4),
        256: AmpereConfig(64, 64, 4),
    },
}
BACKWARD = {
    163: {
        64: AmpereConfig(128, 128, 8, 4, 4, 2),
        96: AmpereConfig(64, 128, 8, 2, 2, 2),
        128: AmpereConfig(64, 128, 8, 2, 2, 2),
        256: AmpereConfig(64, 64, 8, 4, 2, 1),
    },
    99: {
        64: AmpereConfig(64, 128, 8, 2, 4, 2),
        96: AmpereConfig(64, 64, 8, 2, 2, 2),
        128: AmpereConfig(64, 64, 8, 2, 2, 2),
        256: AmpereConfig(32, 32, 4, 2, 2, 2),
    },
}


@gluon.jit
def _buffers(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, D0: gl.constexpr,
             D1: gl.constexpr):  # fmt: skip
    """Return shared memory for COUNT tiles of ROWS tokens, for each part of the channels."""
    l0: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    l1: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, order=[1, 0])
    return part_buffers(dtype, COUNT, ROWS, D0, l0, D1, l1)


@gluon.jit
def _copy(buffers, slot, x, t, T, stride_t, PARTS: gl.constexpr, W: gl.constexpr):
    """Copy tokens from t on, zeros past T, of head x into a slot of shared memory, meanwhile."""
    for part in gl.static_range(PARTS):
        _copy_part(buffers[part].index(slot), x + part * buffers[0].shape[2], t, T, stride_t, W)


@gluon.jit
def _copy_part(buffer, x, t, T, stride_t, W: gl.constexpr):
    ROWS: gl.constexpr = buffer.shape[0]
    C: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [W, 1], [1, 0])
    r = t + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    at = x + r.to(gl.int64)[:, None] * stride_t + c[None, :]
    load_async(buffer, at, mask=(r < T)[:, None])


@gluon.jit
def _product(a, b, acc, K: gl.constexpr):
    """Return acc + a·b for a (M, K) and b (K, N) in shared memory, 16 of K at a time."""
    layout: gl.constexpr = acc.type.layout
    STEP: gl.constexpr = 16
    for i in gl.static_range(K // STEP):
        ai = a.slice(i * STEP, STEP, dim=1).load(gl.DotOperandLayout(0, layout, 2))
        bi = b.slice(i * STEP, STEP, dim=0).load(gl.DotOperandLayout(1, layout, 2))
        acc = mma_v2(ai, bi, acc)
    return acc


@gluon.jit
def _scores(a, a_slot, b, b_slot, layout: gl.constexpr, PARTS: gl.constexpr):
    """Return a·bᵀ (rows of a, rows of b), the sum over all parts of the channels."""
    M: gl.constexpr = a[0].shape[1]
    N: gl.constexpr = b[0].shape[1]
    s = gl.zeros([M, N], gl.float32, layout=layout)
    for part in gl.static_range(PARTS):
        s = _product(
            a[part].index(a_slot), b[part].index(b_slot).permute((1, 0)), s, a[part].shape[2]
        )
    return s


@gluon.jit
def _sums(ROWS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, layout: gl.constexpr):
    """Return zeros (ROWS, D0) and (ROWS, D1), one for each part."""
    result = (gl.zeros([ROWS, D0], gl.float32, layout=layout),)
    if D1 > 0:
        result = (result[0], gl.zeros([ROWS, D1], gl.float32, layout=layout))
    return result


@gluon.jit
def _add(acc, a, b, b_slot, K: gl.constexpr):
    """Return acc + a·b for all parts of the channels, a (M, K) and b (K, D) in shared memory."""
    return [_product(a, b[i].index(b_slot), acc[i], K) for i in (0, 1)[: len(acc)]]


@gluon.jit
def _store(x, acc, factor, t, T, stride_t):
    """Write acc · factor as tokens from t on; nothing past T. `factor` may have a value a row."""
    for part in gl.static_range(len(acc)):
        value = acc[part] * factor
        r = t + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
        c = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
        at = x + part * acc[0].shape[1] + r.to(gl.int64)[:, None] * stride_t + c[None, :]
        gl.store(at, value.to(x.dtype.element_ty), mask=(r < T)[:, None])


@gluon.jit
def _masked(s, first, last, i, n, Tq):
    """Return s with -inf for keys n + column out of the intervals of queries i, one a row."""
    j = n + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    first_i = gl.load(first + i, mask=i < Tq, other=0)
    last_i = gl.load(last + i, mask=i < Tq, other=-1)
    visible = (j[None, :] >= first_i[:, None]) & (j[None, :] <= last_i[:, None])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _keys(bias, n, Tk, s):
    """Load the bias of keys n + column of the scores s; past the end it is 0."""
    j = n + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    return gl.load(bias + j, mask=j < Tk, other=0.0)


@gluon.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q, k, v, out, lse, first, last, sinks, bias, scale_log2,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_ib, stride_bb,
    Tq, Tk, Hq, heads, l2_heads,
    GROUP: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, W: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Compute out (B, Tq, Hq, D) contiguous and lse, for BM queries of one head."""
    PARTS: gl.constexpr = 1 if D1 == 0 else 2
    dtype: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    rows: gl.constexpr = gl.SliceLayout(1, layout)

    # the queries of this program, the longest rows first, and the tiles of keys in their sight
    tiles = gl.cdiv(Tq, BM)
    rank, bh = scheduled_tile(gl.program_id(0), tiles, heads, l2_heads)
    m0 = (tiles - 1 - rank) * BM
    b, h = bh // Hq, bh % Hq
    i = m0 + gl.arange(0, BM, layout=rows)
    first += b * stride_ib
    last += b * stride_ib
    lo, full_lo, full_hi, masked = visible_tiles(first, last, m0, gl.minimum(m0 + BM, Tq), BN)
    hi = lo + masked + full_hi - full_lo
    q += b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh
    k += b.to(gl.int64) * stride_kb + (h // GROUP).to(gl.int64) * stride_kh
    v += b.to(gl.int64) * stride_vb + (h // GROUP).to(gl.int64) * stride_vh

    bias_r = 0.0
    if BIAS:
        bias += b.to(gl.int64) * stride_bb + h.to(gl.int64) * Tk
        last_i = gl.load(last + i, mask=i < Tq, other=0)
        bias_r = gl.load(bias + gl.maximum(last_i, 0))

    qs = _buffers(dtype, 1, BM, D0, D1)
    ks = _buffers(dtype, 1, BN, D0, D1)
    vs = _buffers(dtype, 1, BN, D0, D1)
    m = gl.full([BM], float("-inf"), gl.float32, layout=rows)
    l = gl.zeros([BM], gl.float32, layout=rows)
    acc = _sums(BM, D0, D1, layout)
    _copy(qs, 0, q, m0, Tq, stride_qt, PARTS, W)
    _copy(ks, 0, k, lo * BN, Tk, stride_kt, PARTS, W)
    async_copy.commit_group()

    for t in range(lo, hi):
        # s = q·k, while v loads
        async_copy.wait_group(0)
        _copy(vs, 0, v, t * BN, Tk, stride_vt, PARTS, W)
        async_copy.commit_group()
        s = _scores(qs, 0, ks, 0, layout, PARTS)
        if SOFTCAP is not None:
            s, _ = softcapped(s, scale_log2, SOFTCAP)
        if BIAS:
            s = biased(s, _keys(bias, t * BN, Tk, s)[None, :], bias_r[:, None], scale_log2)
        if (t < full_lo) | (t >= full_hi):
            s = _masked(s, first, last, i, t * BN, Tq)

        # v is there; the next k loads meanwhile
        async_copy.wait_group(0)
        if t + 1 < hi:
            _copy(ks, 0, k, (t + 1) * BN, Tk, stride_kt, PARTS, W)
        async_copy.commit_group()

        # online softmax: scale the old sums to the new maximum
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s * scale_log2 - shift[:, None])
        alpha = gl.exp2(m - shift)
        l = l * alpha + gl.sum(p, 1)
        m = m_new
        pi = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, layout, 2))
        acc = _add_weighted(acc, pi, vs, alpha)

    # epilogue: out and lse
    async_copy.wait_group(0)
    l = gl.where(l == 0.0, 1.0, l)
    lse_i = m * LN2 + gl.log(l)
    if SINKS:
        lse_i, growth = with_sink(lse_i, gl.load(sinks + h) - bias_r)
        l *= growth
    gl.store(lse + bh.to(gl.int64) * Tq + i, lse_i, mask=i < Tq)
    D: gl.constexpr = D0 + D1
    _store(out + (b.to(gl.int64) * Tq * Hq + h) * D, acc, (1.0 / l)[:, None], m0, Tq, Hq * D)


@gluon.jit
def _add_weighted(acc, p, vs, alpha):
    """Return acc · alpha + p·v for all parts of the channels; p is in registers."""
    layout: gl.constexpr = gl.DotOperandLayout(1, acc[0].type.layout, 2)
    result = (mma_v2(p, vs[0].index(0).load(layout), acc[0] * alpha[:, None]),)
    if len(acc) == 2:
        result = (result[0], mma_v2(p, vs[1].index(0).load(layout), acc[1] * alpha[:, None]))
    return result


@gluon.jit
def _register_order(x, W_ROWS: gl.constexpr, W: gl.constexpr):
    """Return x (M, N), a matrix product, as (registers, threads)."""
    # rows: repetition, warp, half of 16 rows, row; columns: repetition, warp, thread, one of two
    M: gl.constexpr = x.shape[0] // (W_ROWS * 16)
    COLS: gl.constexpr = W // W_ROWS
    N: gl.constexpr = x.shape[1] // (COLS * 8)
    x = x.reshape([M, W_ROWS, 2, 8, N, COLS, 4, 2])
    return x.permute((0, 2, 4, 7, 1, 5, 3, 6)).reshape([M * N * 4, W * 32])


@gluon.jit
def _add_to_memory(sums, x, W_ROWS: gl.constexpr, W: gl.constexpr):
    """Add x, a matrix product, to sums in global memory, in the order of registers."""
    x = _register_order(x, W_ROWS, W)
    r = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    c = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    gl.atomic_add(sums + r[:, None] * x.shape[1] + c[None, :], x, sem="relaxed")


@gluon.jit(do_not_specialize=[*LENGTHS, "stride_jb"])
def backward_kernel(
    q, k, v, do, lse2, delta, bias, bias_r, dq, dk_out, dv_out, dbias,
    first, last, qfirst, qlast, scale, scale_log2,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh,
    stride_ib, stride_jb, stride_bb,
    Tq, Tk, Hq, heads, l2_heads,
    GROUP: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, W: gl.constexpr,
    S_ROWS: gl.constexpr, KV_ROWS: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv (B, Tk, Hkv, D) contiguous for BN keys of a head, and add to sums of dq and
    to dbias (B, Hq, Tk).
    """
    PARTS: gl.constexpr = 1 if D1 == 0 else 2
    D: gl.constexpr = D0 + D1
    dtype: gl.constexpr = q.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S_ROWS, W // S_ROWS], [16, 8])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [KV_ROWS, W // KV_ROWS], [16, 8])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)

    # the keys of this program, and the tiles of queries that see them
    n_rank, bh = scheduled_tile(gl.program_id(0), gl.cdiv(Tk, BN), heads, l2_heads)
    n0 = n_rank * BN
    Hkv = Hq // GROUP
    b, hk = bh // Hkv, bh % Hkv
    lo, full_lo, full_hi, masked = visible_tiles(
        qfirst + b * stride_jb, qlast + b * stride_jb, n0, gl.minimum(n0 + BN, Tk), BM
    )
    n = masked + full_hi - full_lo
    # keys past the end are no keys: their scores, 0, might be far above the lse
    full_lo = gl.where(n0 + BN > Tk, full_hi, full_lo)
    first += b * stride_ib
    last += b * stride_ib
    q += b.to(gl.int64) * stride_qb
    do += b.to(gl.int64) * stride_gb
    k += b.to(gl.int64) * stride_kb + hk.to(gl.int64) * stride_kh
    v += b.to(gl.int64) * stride_vb + hk.to(gl.int64) * stride_vh

    ks = _buffers(dtype, 1, BN, D0, D1)
    vs = _buffers(dtype, 1, BN, D0, D1)
    qs = _buffers(dtype, STAGES, BM, D0, D1)
    dos = _buffers(dtype, 1, BM, D0, D1)
    # rows of 64 bytes: two of them for a walk over the banks
    PHASE: gl.constexpr = 2 if BN == 32 else 1
    tile: gl.constexpr = gl.SwizzledSharedLayout(8, PHASE, 8 // PHASE, order=[1, 0])
    ps = gl.allocate_shared_memory(dtype, [BM, BN], tile)
    dss = gl.allocate_shared_memory(dtype, [BM, BN], tile)
    dk = _sums(BN, D0, D1, kv_layout)
    dv = _sums(BN, D0, D1, kv_layout)

    _copy(ks, 0, k, n0, Tk, stride_kt, PARTS, W)
    _copy(vs, 0, v, n0, Tk, stride_vt, PARTS, W)
    if n > 0:
        h0 = (hk * GROUP).to(gl.int64)
        _copy(qs, 0, q + h0 * stride_qh, lo * BM, Tq, stride_qt, PARTS, W)
        _copy(dos, 0, do + h0 * stride_gh, lo * BM, Tq, stride_gt, PARTS, W)
    async_copy.commit_group()

    t, h = lo, hk * GROUP
    for x in range(0, n * GROUP):
        # the tile and the head of the next step
        more = x + 1 < n * GROUP
        is_last = t + 1 == lo + n
        t_next = gl.where(is_last, lo, t + 1)
        h_next = gl.where(is_last, h + 1, h)
        slot = x % STAGES
        m0 = t * BM
        bh_q = (b * Hq + h).to(gl.int64)
        i = m0 + gl.arange(0, BM, layout=rows)
        row = bh_q * gl.cdiv(Tq, ROW) * ROW
        lse_i = gl.load(lse2 + row + i)
        delta_i = gl.load(delta + row + i)
        async_copy.wait_group(0)
        if STAGES == 2:
            if more:
                at = q + h_next.to(gl.int64) * stride_qh
                _copy(qs, (x + 1) % STAGES, at, t_next * BM, Tq, stride_qt, PARTS, W)
            async_copy.commit_group()

        # p = exp(s - lse)
        s = _scores(qs, slot, ks, 0, s_layout, PARTS)
        if SOFTCAP is not None:
            s, slope = softcapped(s, scale_log2, SOFTCAP)
        if BIAS:
            of_head = bias + b.to(gl.int64) * stride_bb + h.to(gl.int64) * Tk
            bias_i = gl.load(bias_r + row + i)
            s = biased(s, _keys(of_head, n0, Tk, s)[None, :], bias_i[:, None], scale_log2)
        if (t < full_lo) | (t >= full_hi):
            s = _masked(s, first, last, i, n0, Tq)
        p = gl.exp2(s * scale_log2 - lse_i[:, None])
        ps.store(p.to(dtype))

        # ds = p (dp - delta), dv += pᵀ·do
        dp = _scores(dos, 0, vs, 0, s_layout, PARTS)
        ds = p * (dp - delta_i[:, None])
        if BIAS:  # no other program adds to these keys
            j = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
            own = dbias + bh_q * Tk + j
            gl.atomic_add(own, gl.sum(ds, 0), mask=j < Tk, sem="relaxed")
        if SOFTCAP is not None:
            ds *= slope
        dss.store(ds.to(dtype))
        dv = _add(dv, ps.permute((1, 0)), dos, 0, BM)

        # all warps are done with do, once they meet for ds
        dq_tile = _add(_sums(BM, D0, D1, s_layout), dss, ks, 0, BN)
        if more:
            at = do + h_next.to(gl.int64) * stride_gh
            _copy(dos, 0, at, t_next * BM, Tq, stride_gt, PARTS, W)
        async_copy.commit_group()
        sums = dq + (bh_q * gl.cdiv(Tq, BM) + t) * (BM * D)
        _add_to_memory(sums, dq_tile[0], S_ROWS, W)
        if PARTS == 2:
            _add_to_memory(sums + BM * D0, dq_tile[1], S_ROWS, W)

        # dk += dsᵀ·q
        t, h = t_next, h_next
        dk = _add(dk, dss.permute((1, 0)), qs, slot, BM)
        if STAGES == 1:
            if more:
                at = q + h_next.to(gl.int64) * stride_qh
                _copy(qs, 0, at, t_next * BM, Tq, stride_qt, PARTS, W)
            async_copy.commit_group()

    async_copy.wait_group(0)
    offset = (b.to(gl.int64) * Tk * Hkv + hk) * D
    _store(dv_out + offset, dv, 1.0, n0, Tk, Hkv * D)
    _store(dk_out + offset, dk, scale, n0, Tk, Hkv * D)


@gluon.jit
def _sorted(sums, M: gl.constexpr, N: gl.constexpr, W_ROWS: gl.constexpr, W: gl.constexpr):
    """Return sums in the order of registers as rows, (M, N)."""
    COLS: gl.constexpr = W // W_ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    r = gl.arange(0, M * N // (W * 32), layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, W * 32, layout=gl.SliceLayout(0, layout))
    x = gl.load(sums + r[:, None] * (W * 32) + c[None, :])
    x = x.reshape([M // (W_ROWS * 16), 2, N // (COLS * 8), 2, W_ROWS, COLS, 8, 4])
    x = x.permute((0, 4, 1, 6, 2, 5, 7, 3)).reshape([M, N])
    return gl.convert_layout(x, gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit(do_not_specialize=["Tq", "Hq"])
def sort_kernel(
    sums, dq, scale, Tq, Hq,
    D0: gl.constexpr, D1: gl.constexpr, BM: gl.constexpr,
    S_ROWS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute dq (B, Tq, Hq, D) contiguous of one tile: its sums in order, scaled and rounded."""
    PARTS: gl.constexpr = 1 if D1 == 0 else 2
    D: gl.constexpr = D0 + D1
    tiles = gl.cdiv(Tq, BM)
    t, bh = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    b, h = bh // Hq, bh % Hq
    sums += gl.program_id(0).to(gl.int64) * (BM * D)
    x = (_sorted(sums, BM, D0, S_ROWS, W),)
    if PARTS == 2:
        x = (x[0], _sorted(sums + BM * D0, BM, D1, S_ROWS, W))
    _store(dq + (b.to(gl.int64) * Tq * Hq + h) * D, x, scale, t * BM, Tq, Hq * D)


def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return out like q, contiguous, and lse (B, Hq, Tq) float32."""
    B, Tq, Hq, D = q.shape
    q, k, v = (_addressable(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, Hq, Tq, dtype=torch.float32, device=q.device)
    c = FORWARD[shared_memory(q.device)][D]
    bias, stride_bb = bias_or(lse, scores)
    if scores.key_bias is not None and c.BM == 128:
        c = c._replace(BN=64, warps=8)  # or biases spill
    with torch.cuda.device_of(q):
        forward_kernel[(triton.cdiv(Tq, c.BM) * B * Hq,)](
            *(q, k, v, out, lse, intervals.first, intervals.last, sinks_or(lse, scores), bias),
            scores.scale * LOG2E.value,
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], batch_stride(intervals.first)),
            stride_bb,
            *(Tq, k.shape[1], Hq, B * Hq, heads_in_l2(k, B * Hq, Hq // k.shape[2])),
            *(Hq // k.shape[2], *split(D), c.BM, c.BN, c.warps, scores.softcap),
            *(scores.sinks is not None, scores.key_bias is not None),
            num_warps=c.warps,
        )
    return out, lse


def backward(
    do: Tensor, dlse: Tensor | None, saved: Saved, intervals: Intervals, scores: Scores
) -> Gradients:
    """Return dq, dk, dv, contiguous, dsinks and dkey_bias."""
    q, k, v, _, lse = saved
    B, Tq, Hq, D = q.shape
    Tk, Hkv = k.shape[1:3]
    q, k, v, do = (_addressable(x) for x in (q, k, v, do))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    lse2, delta, bias_r, dsinks = preprocess(do, dlse, saved, intervals, scores)
    bias, stride_bb = bias_or(lse, scores)
    dbias = None if bias_r is None else lse.new_zeros(B, Hq, Tk)
    ref, to_bias = (lse if x is None else x for x in (bias_r, dbias))
    scale = scores.scale
    c, parts = BACKWARD[shared_memory(q.device)][D], split(D)
    tiles = triton.cdiv(Tq, c.BM)
    sums = torch.zeros(B * Hq * tiles * c.BM * D, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        backward_kernel[(triton.cdiv(Tk, c.BN) * B * Hkv,)](
            *(q, k, v, do, lse2, delta, bias, ref, sums, dk, dv, to_bias, *intervals[:4]),
            *(scale, scale * LOG2E.value),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3]),
            *(batch_stride(intervals.first), batch_stride(intervals.qfirst), stride_bb),
            *(Tq, Tk, Hq, B * Hkv, heads_in_l2(q, B * Hkv, 1), Hq // Hkv, *parts),
            *(c.BM, c.BN, c.warps, c.S_ROWS, c.KV_ROWS, c.STAGES, scores.softcap),
            bias_r is not None,
            num_warps=c.warps,
        )
        sort_kernel[(tiles * B * Hq,)](
            *(sums, dq, scale, Tq, Hq, *parts, c.BM, c.S_ROWS, c.warps), num_warps=4
        )
    return Gradients(dq, dk, dv, dsinks, dbias)


def shared_memory(device: torch.device) -> int:
    """Return the row of FORWARD and BACKWARD whose tiles fit into the memory of a GPU."""
    available = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return max(KiB for KiB in FORWARD if KiB << 10 <= available)


def _addressable(x: Tensor) -> Tensor:
    """Return x (B, T, H, D), or a copy if rows of its heads do not begin at 16 bytes."""
    *strides, last = x.stride()
    aligned = last == 1 and x.data_ptr() % 16 == 0 and not any(s % 16 for s in strides)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)
