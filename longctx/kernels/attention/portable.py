"""FlashAttention-2 forward and backward in portable Triton (Dao, arXiv 2307.08691).

    s_ij = scale · q_i·k_j  for first_i <= j <= last_i, else -inf
    lse_i = log Σ_j exp(s_ij),   p_ij = exp(s_ij - lse_i),   o_i = Σ_j p_ij v_j
    delta_i = do_i·o_i - dlse_i,   dp_ij = do_i·v_j,   ds_ij = p_ij (dp_ij - delta_i)
    dv_j = Σ_i p_ij do_i,   dk_j = scale · Σ_i ds_ij q_i,   dq_i = scale · Σ_j ds_ij k_j

With a softcap c scores become c · tanh(s_ij / c) before the mask, and ds_ij is multiplied by
1 - tanh². SOFTCAP is a constant of the kernel: without it nothing of this is compiled.

A sink z of the query's head joins the softmax and has no value. The sums end as without it, then

    lse' = log(exp(lse) + exp(z)),   o' = o · exp(lse - lse') = o / (1 + exp(z - lse))

The backward takes lse' and o' for lse and o, and dz = -Σ_i exp(z - lse'_i) · delta_i.

A key bias b joins as key_bias.py says, relative to the last key r of a query: scores get b_j - b_r,
a sink is z - b_r, and db_j = Σ_i ds_ij.

Exponentials are taken in base 2, with scale·log2(e) folded into one multiply-add. A program of the
forward and of the dq kernel owns a tile of queries and loops over keys; one of the dk/dv kernel
owns a tile of keys and loops over the queries of its whole group. Nothing is added atomically, so
every result is deterministic. With an interval mask each loop has tiles that need the mask at both
ends, and tiles without it in the middle. Tiles out of sight are never touched: intervals do not
decrease, so the tiles that a tile sees are one range. Its tiles lo .. full_lo-1 need the mask,
full_lo .. full_hi-1 are seen entirely, and full_hi .. need it again; four scalars, from both ends
of the tile, give these borders. The Hopper kernels share the schedule.

Legend: B batch, T tokens (Tq queries, Tk keys), H heads, GROUP query heads per key-value head, D
head size, PAD the power of two that holds it, BM queries and BN keys of a tile. q, o, do (B, Tq,
Hq, D); k, v (B, Tk, Hkv, D); lse, delta (B, Hq, Tq).

NaN and inf in a key, or in a query's gradient, reach exactly the rows that see it. In masked tiles
0 · NaN could leak into rows that do not: there such operands are zeroed, and the rows that do see
them are made NaN through their scores.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from longctx.kernels.attention import Gradients, Intervals, Saved, Scores
from longctx.kernels.attention.key_bias import reference
from longctx.kernels.attention.launch import Launch, launch_config
from longctx.kernels.attention.relaunch import Relaunch, first_launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# lse2 and delta have rows padded to a multiple of it, so that no tile reads past one
ROW = tl.constexpr(128)
# rows of a program of `delta_kernel`: few, so that many programs wait for memory at a time
DELTA_ROWS = tl.constexpr(32)
# never specialized on: any length reuses the compiled kernel
LENGTHS = ["Tq", "Tk", "Hq", "heads", "l2_heads", "stride_ib", "stride_bb"]
L2_BYTES = 32 << 20  # of the cache, for the tiles that the heads of a group load again and again


@triton.jit
def scheduled_tile(t, tiles, heads, l2_heads):
    """Return the t-th tile of the schedule: (rank, head).

    Heads are taken in groups of `l2_heads`, whose operands fit into L2 together; in a group the
    longest tiles come first.
    """
    group = t // (tiles * l2_heads)
    size = tl.minimum(l2_heads, heads - group * l2_heads)
    in_group = t - group * tiles * l2_heads
    return in_group // size, group * l2_heads + in_group % size


@triton.jit
def visible_tiles(first, last, start, end, SIZE: tl.constexpr, before=0):
    """Return tiles of SIZE in sight of start .. end-1: (lo, full_lo, full_hi, masked).

    Tiles full_lo .. full_hi-1 need no mask; `masked` counts the others, before and after. Tiles
    begin `before` before multiples of SIZE.
    """
    first_lo, first_hi = tl.load(first + start) + before, tl.load(first + end - 1) + before
    last_lo, last_hi = tl.load(last + start) + before, tl.load(last + end - 1) + before
    lo = first_lo // SIZE
    hi = tl.maximum(tl.cdiv(last_hi + 1, SIZE), lo)
    full_lo = tl.cdiv(first_hi, SIZE)
    full_hi = (last_lo + 1) // SIZE
    full_lo = tl.where(full_hi > full_lo, full_lo, hi)
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, full_lo - lo + tl.maximum(hi - full_hi, 0)


@triton.jit
def masked_tile(t, lo, full_lo, full_hi):
    """Return the t-th masked tile: first the tiles before full_lo, then the tiles from full_hi."""
    return tl.where(t < full_lo - lo, lo + t, full_hi + t - (full_lo - lo))


@triton.jit
def _head(x, b, h, T, stride_b, stride_h, TMA: tl.constexpr):
    """Return the beginning of head h of sequence b: (base, row, column).

    With TMA the base is a descriptor of a (B·T, columns) matrix, otherwise a pointer moved there.
    """
    if TMA:
        return x, b * T, h * stride_h
    else:
        return x + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h, 0, 0


@triton.jit
def _load(
    x, row, column, t, T, stride_t,
    D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load tokens t .. t+ROWS of one head, (ROWS, PAD).

    Rows past T are 0. With TMA they are whatever memory holds, finite or not.
    """
    if TMA:
        return x.load([row + t, column])
    else:
        r, d = tl.arange(0, ROWS), tl.arange(0, PAD)
        inside = (t + r < T)[:, None] & (d < D)[None, :]
        at = x + (t + r).to(tl.int64)[:, None] * stride_t + d[None, :]
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _store(x, value, t, T, stride_t, D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """Write tokens t .. t+ROWS of one head; nothing past T and D."""
    r, d = tl.arange(0, ROWS), tl.arange(0, PAD)
    inside = (t + r < T)[:, None] & (d < D)[None, :]
    at = x + (t + r).to(tl.int64)[:, None] * stride_t + d[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _row(bias, b, h, Tk, stride_b):
    """Return the beginning of head h of sequence b of a key bias or its gradient."""
    return bias + b.to(tl.int64) * stride_b + h.to(tl.int64) * Tk


@triton.jit
def _keys(bias, n, Tk, SIZE: tl.constexpr):
    """Load the bias of keys n .. n+SIZE; past the end it is 0."""
    j = n + tl.arange(0, SIZE)
    return tl.load(bias + j, mask=j < Tk, other=0.0)


@triton.jit
def _finite(x):
    """Return x with NaN and ±inf replaced by 0."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _tanh(x):
    """Return tanh(x), to a few units in the last place of fp32.

    (1 - e) / (1 + e) with e = exp(-2 |x|) would lose the digits of small x: there, its series.
    """
    y = x * x
    series = -0.3333333333333333 + y * (0.13333333333333333 + y * (-0.05396825396825397 + y * (
        0.021869488536155203 - y * 0.008863235529902197
    )))  # fmt: skip
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    large = tl.where(x < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    return tl.where(y < 0.0625, x + x * y * series, large)


@triton.jit
def softcapped(s, scale_log2, SOFTCAP: tl.constexpr):
    """Return capped scores, in the units of the products s = q·k, and their derivative by s."""
    tanh = _tanh(s * (scale_log2 / (SOFTCAP * LOG2E)))
    return tanh * (SOFTCAP * LOG2E / scale_log2), 1.0 - tanh * tanh


@triton.jit
def biased(s, bias_j, bias_r, scale_log2):
    """Return scores s with b_j - b_r, in the units of the products."""
    return s + (bias_j - bias_r) * (LOG2E / scale_log2)


@triton.jit
def with_sink(lse, sink):
    """Return the lse with a logit more, and by what factor the sum of exponentials grows."""
    # a blind query has lse -inf: its sink is all it has, and -inf - -inf would be NaN
    above = tl.where(lse == float("-inf"), float("inf"), sink - lse)
    return tl.maximum(lse, sink) + tl.log(1.0 + tl.exp(-tl.abs(above))), 1.0 + tl.exp(above)


@triton.jit
def _own_queries(
    first, last, stride_ib, Tq, Hq, heads, l2_heads, BM: tl.constexpr, BN: tl.constexpr
):
    """Return the BM queries of this program, and the tiles of keys in their sight.

    Row b, head h, number bh of both, first query m0, queries i, their intervals, then as
    `visible_tiles`.
    """
    tiles = tl.cdiv(Tq, BM)
    rank, bh = scheduled_tile(tl.program_id(0), tiles, heads, l2_heads)
    m0 = (tiles - 1 - rank) * BM
    b, h = bh // Hq, bh % Hq
    i = m0 + tl.arange(0, BM)
    first += b * stride_ib
    last += b * stride_ib
    first_i = tl.load(first + i, mask=i < Tq, other=0)
    last_i = tl.load(last + i, mask=i < Tq, other=-1)
    lo, full_lo, full_hi, masked = visible_tiles(first, last, m0, tl.minimum(m0 + BM, Tq), BN)
    return b, h, bh, m0, i, first_i, last_i, lo, full_lo, full_hi, masked


@triton.jit
def _forward_tile(
    q, m, l, acc,
    k, k_row, k_col, v, v_row, v_col,
    n, Tk, stride_kt, stride_vt, first_i, last_i, bias, bias_r, scale_log2,
    D: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return m, l, acc after one more tile of keys, from n on, by online softmax."""
    # s = q·k, in fp32
    kj = _load(k, k_row, k_col, n, Tk, stride_kt, D, PAD, BN, TMA)
    s = tl.dot(q, kj.T, input_precision="ieee")
    if SOFTCAP is not None:
        s, _ = softcapped(s, scale_log2, SOFTCAP)
    if BIAS:
        s = biased(s, _keys(bias, n, Tk, BN)[None, :], bias_r[:, None], scale_log2)
    vj = _load(v, v_row, v_col, n, Tk, stride_vt, D, PAD, BN, TMA)
    if MASKED:
        j = n + tl.arange(0, BN)
        # a value that is not finite makes the scores of its key NaN for the rows that see it;
        # in the product it is 0, so other rows stay clean
        good = _finite(vj)
        s += tl.where(tl.sum((good != vj).to(tl.int32), 1) > 0, float("nan"), 0.0)[None, :]
        vj = good
        visible = (j[None, :] >= first_i[:, None]) & (j[None, :] <= last_i[:, None])
        s = tl.where(visible, s, float("-inf"))
    # online softmax: scale the old sums to the new maximum
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    shift = m_new
    if MASKED:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale_log2 - shift[:, None])
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(vj.dtype), vj, acc * alpha[:, None], input_precision="ieee")
    return m_new, l, acc


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q, k, v, out, lse, first, last, sinks, bias, scale_log2,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_ib, stride_bb,
    Tq, Tk, Hq, heads, l2_heads,
    GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute out (B, Tq, Hq, D) contiguous and lse, for BM queries of one head."""
    # the queries of this program, and the tiles of keys in their sight
    b, h, bh, m0, i, first_i, last_i, lo, full_lo, full_hi, masked = _own_queries(
        first, last, stride_ib, Tq, Hq, heads, l2_heads, BM, BN
    )

    q, q_row, q_col = _head(q, b, h, Tq, stride_qb, stride_qh, TMA)
    k, k_row, k_col = _head(k, b, h // GROUP, Tk, stride_kb, stride_kh, TMA)
    v, v_row, v_col = _head(v, b, h // GROUP, Tk, stride_vb, stride_vh, TMA)
    qi = _load(q, q_row, q_col, m0, Tq, stride_qt, D, PAD, BM, TMA)
    bias_r = 0.0
    if BIAS:
        bias = _row(bias, b, h, Tk, stride_bb)
        bias_r = tl.load(bias + tl.maximum(last_i, 0))
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, PAD], tl.float32)

    # steady state: tiles that need no mask; then the few masked ones, without a pipeline
    for MASKED in tl.static_range(2):
        start, end = (0, masked) if MASKED else (full_lo, full_hi)
        for t in tl.range(start, end, num_stages=1 if MASKED else STAGES):
            n = masked_tile(t, lo, full_lo, full_hi) if MASKED else t
            m, l, acc = _forward_tile(
                qi, m, l, acc,
                k, k_row, k_col, v, v_row, v_col,
                n * BN, Tk, stride_kt, stride_vt, first_i, last_i, bias, bias_r, scale_log2,
                D, PAD, BN, TMA, SOFTCAP, BIAS, MASKED,
            )  # fmt: skip

    # epilogue: out and lse
    l = tl.where(l == 0.0, 1.0, l)
    lse_i = m * LN2 + tl.log(l)
    if SINKS:
        lse_i, growth = with_sink(lse_i, tl.load(sinks + h) - bias_r)
        l *= growth
    acc = acc / l[:, None]
    tl.store(lse + bh.to(tl.int64) * Tq + i, lse_i, mask=i < Tq)
    _store(out + (b.to(tl.int64) * Tq * Hq + h) * D, acc, m0, Tq, Hq * D, D, PAD, BM)


@triton.jit(do_not_specialize=LENGTHS)
def delta_kernel(
    out, do, lse, dlse, sinks, bias_r, lse2, delta, dsinks, zeros,
    stride_ob, stride_ot, stride_oh,
    stride_gb, stride_gt, stride_gh,
    Tq, Hq, zeros_each,
    D: tl.constexpr, PAD: tl.constexpr, HAS_DLSE: tl.constexpr, SINKS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Compute delta = Σ do·o - dlse, the lse in base 2, and each program's part of dsinks, (Hq, n);
    write `zeros_each` zeros, too.

    For blind queries and past the end the lse is +inf, so p is 0.
    """
    # nobody waits for these stores
    zeros += tl.program_id(0).to(tl.int64) * zeros_each
    for start in range(0, zeros_each, 4096):
        at = start + tl.arange(0, 4096)
        tl.store(zeros + at, tl.zeros([4096], tl.float32), mask=at < zeros_each)
    padded = tl.cdiv(Tq, ROW) * ROW
    tiles = padded // DELTA_ROWS
    # heads side by side: they are neighbours in memory
    h, tile = tl.program_id(0) % Hq, tl.program_id(0) // Hq
    b, t = tile // tiles, tile % tiles * DELTA_ROWS
    i = t + tl.arange(0, DELTA_ROWS)
    out, _, _ = _head(out, b, h, Tq, stride_ob, stride_oh, False)
    do, _, _ = _head(do, b, h, Tq, stride_gb, stride_gh, False)
    o_i = _load(out, 0, 0, t, Tq, stride_ot, D, PAD, DELTA_ROWS, False).to(tl.float32)
    do_i = _load(do, 0, 0, t, Tq, stride_gt, D, PAD, DELTA_ROWS, False).to(tl.float32)
    total = tl.sum(o_i * do_i, 1)
    bh = (b * Hq + h).to(tl.int64)
    at = bh * Tq + i
    if HAS_DLSE:
        total -= tl.load(dlse + at, mask=i < Tq, other=0.0)
    # base 2, as the other kernels take it
    x = tl.load(lse + at, mask=i < Tq, other=float("-inf"))
    if SINKS:
        sink = tl.load(sinks + h)
        if BIAS:
            sink -= tl.load(bias_r + bh * padded + i)
        p = tl.where(x == float("-inf"), 0.0, tl.exp(sink - x))
        tl.store(dsinks + h * (tl.num_programs(0) // Hq) + tile, -tl.sum(p * total, 0))
    at = bh * padded + i
    tl.store(lse2 + at, tl.where(x == float("-inf"), float("inf"), x * LOG2E))
    tl.store(delta + at, total)


@triton.jit
def _dkv_tile(
    k, v, dk, dv, dbias,
    q, q_row, q_col, do, do_row, do_col, lse2, delta, bias_j, bias_r,
    m0, Tq, stride_qt, stride_gt, qfirst_j, qlast_j, scale_log2,
    D: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TMA: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return dk and dbias, if DK, and dv, if DV, of a tile of keys after more queries, from m0 on.

    Scores are transposed, so that p and ds are register operands.
    """
    i = m0 + tl.arange(0, BM)
    # s and p of the tile, from the saved lse: no second softmax
    qi = _load(q, q_row, q_col, m0, Tq, stride_qt, D, PAD, BM, TMA)
    if MASKED:
        qi = _finite(qi)
    lse_i = tl.load(lse2 + i)
    delta_i = tl.load(delta + i)
    s = tl.dot(k, qi.T, input_precision="ieee")
    if SOFTCAP is not None:
        s, slope = softcapped(s, scale_log2, SOFTCAP)
    if BIAS:
        s = biased(s, bias_j[:, None], tl.load(bias_r + i)[None, :], scale_log2)
    p = tl.exp2(s * scale_log2 - lse_i[None, :])
    do_i = _load(do, do_row, do_col, m0, Tq, stride_gt, D, PAD, BM, TMA)
    if MASKED:
        do_i = _finite(do_i)
        visible = (i[None, :] >= qfirst_j[:, None]) & (i[None, :] <= qlast_j[:, None])
        p = tl.where(visible, p + 0.0 * delta_i[None, :], 0.0)
    # dv += pᵀ·do, dk += dsᵀ·q
    if DV:
        dv = tl.dot(p.to(do_i.dtype), do_i, dv, input_precision="ieee")
    if DK:
        ds = p * (tl.dot(v, do_i.T, input_precision="ieee") - delta_i[None, :])
        # dbias += Σ ds, without scale and slope: it was added behind them
        if BIAS:
            dbias += tl.sum(tl.where(visible, ds, 0.0) if MASKED else ds, 1)
        if SOFTCAP is not None:
            ds *= slope
        if MASKED:
            ds = tl.where(visible, ds, 0.0)
        dk = tl.dot(ds.to(qi.dtype), qi, dk, input_precision="ieee")
    return dk, dv, dbias


@triton.jit(do_not_specialize=LENGTHS)
def dkv_kernel(
    q, k, v, do, lse2, delta, bias, bias_r, dk_out, dv_out, dbias_out, qfirst, qlast,
    scale, scale_log2,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh,
    stride_ib, stride_bb,
    Tq, Tk, Hq, heads, l2_heads,
    GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TMA: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv (B, Tk, Hkv, D) contiguous, for BN keys of one key-value head, and dbias
    (B, Hq, Tk) contiguous of its group.
    """
    # the keys, and the tiles of queries that see them
    n_rank, bh = scheduled_tile(tl.program_id(0), tl.cdiv(Tk, BN), heads, l2_heads)
    n0 = n_rank * BN
    Hkv = Hq // GROUP
    b, hk = bh // Hkv, bh % Hkv
    j = n0 + tl.arange(0, BN)
    qfirst += b * stride_ib
    qlast += b * stride_ib
    qfirst_j = tl.load(qfirst + j, mask=j < Tk, other=0)
    qlast_j = tl.load(qlast + j, mask=j < Tk, other=-1)
    # the transposed intervals give the queries in sight of these keys
    lo, full_lo, full_hi, masked = visible_tiles(qfirst, qlast, n0, tl.minimum(n0 + BN, Tk), BM)

    k, k_row, k_col = _head(k, b, hk, Tk, stride_kb, stride_kh, TMA)
    v, v_row, v_col = _head(v, b, hk, Tk, stride_vb, stride_vh, TMA)
    kj = _load(k, k_row, k_col, n0, Tk, stride_kt, D, PAD, BN, TMA)
    vj = _load(v, v_row, v_col, n0, Tk, stride_vt, D, PAD, BN, TMA)
    dk = tl.zeros([BN, PAD], tl.float32)
    dv = tl.zeros([BN, PAD], tl.float32)
    for g in range(GROUP):
        h = hk * GROUP + g
        qh, q_row, q_col = _head(q, b, h, Tq, stride_qb, stride_qh, TMA)
        doh, do_row, do_col = _head(do, b, h, Tq, stride_gb, stride_gh, TMA)
        # lse2 and delta have rows padded to a multiple of ROW
        row = (b * Hq + h).to(tl.int64) * tl.cdiv(Tq, ROW) * ROW
        bias_j = 0.0
        dbias = 0.0
        if BIAS:
            bias_j = _keys(_row(bias, b, h, Tk, stride_bb), n0, Tk, BN)
            dbias = tl.zeros([BN], tl.float32)

        # steady state: tiles that need no mask; then the few masked ones, without a pipeline
        for MASKED in tl.static_range(2):
            start, end = (0, masked) if MASKED else (full_lo, full_hi)
            for t in tl.range(start, end, num_stages=1 if MASKED else STAGES):
                m = masked_tile(t, lo, full_lo, full_hi) if MASKED else t
                dk, dv, dbias = _dkv_tile(
                    kj, vj, dk, dv, dbias, qh, q_row, q_col, doh, do_row, do_col,
                    lse2 + row, delta + row, bias_j, bias_r + row,
                    m * BM, Tq, stride_qt, stride_gt, qfirst_j, qlast_j, scale_log2,
                    D, PAD, BM, DK, DV, TMA, SOFTCAP, BIAS, MASKED,
                )  # fmt: skip
        if BIAS and DK:
            tl.store(_row(dbias_out, b, h, Tk, Hq * Tk) + j, dbias, mask=j < Tk)

    # epilogue
    offset = (b.to(tl.int64) * Tk * Hkv + hk) * D
    if DV:
        _store(dv_out + offset, dv, n0, Tk, Hkv * D, D, PAD, BN)
    if DK:
        _store(dk_out + offset, dk * scale, n0, Tk, Hkv * D, D, PAD, BN)


@triton.jit
def _dq_tile(
    q, do, dq, lse_i, delta_i,
    k, k_row, k_col, v, v_row, v_col,
    n, Tk, stride_kt, stride_vt, first_i, last_i, bias, bias_r, scale_log2,
    D: tl.constexpr, PAD: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return dq of a tile of queries after one more tile of keys, from n on."""
    # p again from the saved lse, then ds
    kj = _load(k, k_row, k_col, n, Tk, stride_kt, D, PAD, BN, TMA)
    vj = _load(v, v_row, v_col, n, Tk, stride_vt, D, PAD, BN, TMA)
    if MASKED:
        kj = _finite(kj)
    s = tl.dot(q, kj.T, input_precision="ieee")
    if SOFTCAP is not None:
        s, slope = softcapped(s, scale_log2, SOFTCAP)
    if BIAS:
        s = biased(s, _keys(bias, n, Tk, BN)[None, :], bias_r[:, None], scale_log2)
    p = tl.exp2(s * scale_log2 - lse_i[:, None])
    ds = p * (tl.dot(do, vj.T, input_precision="ieee") - delta_i[:, None])
    if SOFTCAP is not None:
        ds *= slope
    if MASKED:
        j = n + tl.arange(0, BN)
        ds = tl.where((j[None, :] >= first_i[:, None]) & (j[None, :] <= last_i[:, None]), ds, 0.0)
    return tl.dot(ds.to(kj.dtype), kj, dq, input_precision="ieee")


@triton.jit(do_not_specialize=LENGTHS)
def dq_kernel(
    q, k, v, do, lse2, delta, bias, bias_r, dq_out, first, last, scale, scale_log2,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh,
    stride_ib, stride_bb,
    Tq, Tk, Hq, heads, l2_heads,
    GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute dq (B, Tq, Hq, D) contiguous, for BM queries of one head."""
    # the queries of this program, and the tiles of keys in their sight
    b, h, bh, m0, i, first_i, last_i, lo, full_lo, full_hi, masked = _own_queries(
        first, last, stride_ib, Tq, Hq, heads, l2_heads, BM, BN
    )

    # the program's own operands: q, do, lse and delta of its queries
    q, q_row, q_col = _head(q, b, h, Tq, stride_qb, stride_qh, TMA)
    do, do_row, do_col = _head(do, b, h, Tq, stride_gb, stride_gh, TMA)
    k, k_row, k_col = _head(k, b, h // GROUP, Tk, stride_kb, stride_kh, TMA)
    v, v_row, v_col = _head(v, b, h // GROUP, Tk, stride_vb, stride_vh, TMA)
    qi = _load(q, q_row, q_col, m0, Tq, stride_qt, D, PAD, BM, TMA)
    do_i = _load(do, do_row, do_col, m0, Tq, stride_gt, D, PAD, BM, TMA)
    row = bh.to(tl.int64) * tl.cdiv(Tq, ROW) * ROW
    lse_i = tl.load(lse2 + row + i)
    delta_i = tl.load(delta + row + i)
    bias_i = 0.0
    if BIAS:
        bias = _row(bias, b, h, Tk, stride_bb)
        bias_i = tl.load(bias_r + row + i)
    dq = tl.zeros([BM, PAD], tl.float32)

    # steady state: tiles that need no mask; then the few masked ones, without a pipeline
    for MASKED in tl.static_range(2):
        start, end = (0, masked) if MASKED else (full_lo, full_hi)
        for t in tl.range(start, end, num_stages=1 if MASKED else STAGES):
            n = masked_tile(t, lo, full_lo, full_hi) if MASKED else t
            dq = _dq_tile(
                qi, do_i, dq, lse_i, delta_i,
                k, k_row, k_col, v, v_row, v_col,
                n * BN, Tk, stride_kt, stride_vt, first_i, last_i, bias, bias_i, scale_log2,
                D, PAD, BN, TMA, SOFTCAP, BIAS, MASKED,
            )  # fmt: skip
    _store(dq_out + (b.to(tl.int64) * Tq * Hq + h) * D, dq * scale, m0, Tq, Hq * D, D, PAD, BM)


def batch_stride(interval: Tensor) -> int:
    """Return the stride between rows of intervals (B or 1, T); 0 if one row serves all."""
    return interval.stride(0) if interval.shape[0] > 1 else 0


def heads_in_l2(x: Tensor, heads: int, multiple: int, operands: int = 2) -> int:
    """Count the heads, a multiple of `multiple`, of which `operands` as large as x fill the L2."""
    per_head = operands * x.shape[1] * x.shape[3] * x.element_size()
    return min(heads, max(1, L2_BYTES // per_head) * multiple)


def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return out like q, contiguous, and lse (B, Hq, Tq) float32."""
    B, Tq, Hq, _ = q.shape
    # tensor maps load whole tiles, from Hopper on
    tma = _use_tma(q)
    q, k, v = (_addressable(x, tma) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, Hq, Tq, dtype=torch.float32, device=q.device)
    c = launch_config("forward", q, k.shape[1])
    bias, stride_bb = bias_or(lse, scores)
    with torch.cuda.device_of(q):
        forward_kernel[(triton.cdiv(Tq, c.BM) * B * Hq,)](
            *(_operand(x, rows, tma) for x, rows in ((q, c.BM), (k, c.BN), (v, c.BN))),
            *(out, lse, intervals.first, intervals.last, sinks_or(lse, scores), bias),
            scores.scale * LOG2E.value,
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], batch_stride(intervals.first)),
            stride_bb,
            *(Tq, k.shape[1], Hq, B * Hq, heads_in_l2(k, B * Hq, Hq // k.shape[2])),
            **_constants(q, k, c, tma, scores),
            SINKS=scores.sinks is not None,
        )
    return out, lse


def backward(
    do: Tensor, dlse: Tensor | None, saved: Saved, intervals: Intervals, scores: Scores
) -> Gradients:
    """Return dq, dk, dv, contiguous, dsinks and dkey_bias."""
    q, k, v, _, lse = saved
    B, Tq, Hq, D = q.shape
    Tk, Hkv = k.shape[1:3]
    tma = _use_tma(q)
    q, k, v, do = (_addressable(x, tma) for x in (q, k, v, do))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    lse2, delta, bias_r, dsinks = preprocess(do, dlse, saved, intervals, scores)
    bias, stride_bb = bias_or(lse, scores)
    dbias = None if bias_r is None else lse.new_empty(B, Hq, Tk)
    given = bias, lse if bias_r is None else bias_r

    def launch(kernel, c, tiles, heads, l2_heads, outputs, ends, **constants):
        operands = (q, c.BM), (k, c.BN), (v, c.BN), (do, c.BM)
        strides = *(n for x in (q, k, v, do) for n in x.stride()[:3]), batch_stride(ends[0])
        kernel[(tiles * heads,)](
            *(_operand(x, rows, tma) for x, rows in operands),
            *(lse2, delta, *given, *outputs, *ends, scores.scale, scores.scale * LOG2E.value),
            *(*strides, stride_bb, Tq, Tk, Hq, heads, l2_heads),
            **_constants(q, k, c, tma, scores),
            **constants,
        )

    with torch.cuda.device_of(q):
        # a program owns keys and goes over queries: it adds up dk and dv without atomics
        c, heads = launch_config("dkv", q, Tk), B * Hkv
        tiles, l2_heads = triton.cdiv(Tk, c.BN), heads_in_l2(q, heads, 1)
        # the registers of a multiprocessor hold two sums of 256 channels, or one of 512
        for DK, DV in ((True, True),) if D <= 256 else ((True, False), (False, True)):
            ends = intervals[2:4]
            outputs = dk, dv, lse if dbias is None else dbias
            launch(dkv_kernel, c, tiles, heads, l2_heads, outputs, ends, DK=DK, DV=DV)

        # a program owns queries and goes over keys: it adds up dq
        c, heads = launch_config("dq", q, Tk), B * Hq
        tiles, l2_heads = triton.cdiv(Tq, c.BM), heads_in_l2(k, heads, Hq // Hkv)
        launch(dq_kernel, c, tiles, heads, l2_heads, (dq,), intervals[:2])
    return Gradients(dq, dk, dv, dsinks, dbias)


def sinks_or(lse: Tensor, scores: Scores) -> Tensor:
    """Return the sinks of `scores`, or a tensor for their place in a kernel that reads none."""
    return lse if scores.sinks is None else scores.sinks


def bias_or(lse: Tensor, scores: Scores) -> tuple[Tensor, int]:
    """Return the key bias and the stride of its batch, or the place of a kernel that has none."""
    bias = scores.key_bias
    return (lse, 0) if bias is None else (bias, bias.stride(0))


def padded_reference(lse: Tensor, scores: Scores, intervals: Intervals) -> Tensor | None:
    """Return the `reference` of each query in rows like delta's, if there is a key bias."""
    if scores.key_bias is None:
        return None
    ref = reference(scores.key_bias, intervals.last)
    return pad(ref, (0, padded_rows(lse)[2] - lse.shape[2]))


def preprocess(
    do: Tensor, dlse: Tensor | None, saved: Saved, intervals: Intervals, scores: Scores
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return lse in base 2, delta and `padded_reference`, each (B, Hq, Tq padded to a multiple of
    ROW) float32, and the gradient of the sinks, if any.
    """
    out, lse, sinks = saved.out, saved.lse, scores.sinks
    bias_r = padded_reference(lse, scores, intervals)
    lse2, delta = lse.new_empty((2, *padded_rows(lse))).unbind()
    parts = lse2 if sinks is None else lse.new_empty(sink_parts(lse))
    with torch.cuda.device_of(out):
        preprocess_into((lse2, delta, parts, lse2[:0]), do, dlse, saved, sinks, bias_r)
    return lse2, delta, bias_r, None if sinks is None else parts.sum(1)


def padded_rows(lse: Tensor) -> torch.Size:
    """Return the shape of lse2 and delta for lse (B, Hq, Tq)."""
    B, Hq, Tq = lse.shape
    return torch.Size((B, Hq, triton.cdiv(Tq, ROW.value) * ROW.value))


def sink_parts(lse: Tensor) -> tuple[int, int]:
    """Return the shape of the parts of dsinks: programs of `delta_kernel` add up rows of each."""
    B, Hq, rows = padded_rows(lse)
    return Hq, B * rows // DELTA_ROWS.value


def preprocess_into(
    into: tuple[Tensor, ...], do: Tensor, dlse: Tensor | None, saved: Saved, *more: Tensor | None
) -> Relaunch | None:
    """Compute lse2, delta, parts of dsinks and zeros, a multiple of the `sink_parts`, `into` such
    tensors; return how to do it again, or None in the interpreter.

    `more` are sinks and `padded_reference`. The addresses are those of out, do, lse, dlse, `more`
    (or lse again) and `into`.
    """
    out, lse, (sinks, bias_r) = saved.out, saved.lse, more
    Tq, Hq, D = out.shape[1:]
    dlse = None if dlse is None else dlse.contiguous()
    pointers = out, do, lse, *(lse if x is None else x for x in (dlse, *more)), *into
    programs = math.prod(sink_parts(lse))
    scalars = *out.stride()[:3], *do.stride()[:3], Tq, Hq, into[3].numel() // programs
    has = dict(HAS_DLSE=dlse is not None, SINKS=sinks is not None, BIAS=bias_r is not None)
    constants = dict(D=D, PAD=triton.next_power_of_2(D), **has)
    return first_launch(delta_kernel, programs, (), pointers, scalars, constants, num_warps=8)


def _constants(q: Tensor, k: Tensor, c: Launch, tma: bool, scores: Scores) -> dict[str, object]:
    D = q.shape[3]
    return dict(
        GROUP=q.shape[2] // k.shape[2],
        D=D,
        PAD=triton.next_power_of_2(D),
        BM=c.BM,
        BN=c.BN,
        STAGES=c.stages,
        TMA=tma,
        SOFTCAP=scores.softcap,
        BIAS=scores.key_bias is not None,
        num_warps=c.warps,
        num_stages=c.stages,
    )


def _use_tma(q: Tensor) -> bool:
    """Return True to load by tensor maps: from Hopper on, 16-bit heads that fill their tile.

    A padded head would read its neighbour.
    """
    if not q.is_cuda or torch.version.hip is not None or q.element_size() != 2:
        return False
    D = q.shape[3]
    return D == triton.next_power_of_2(D) and torch.cuda.get_device_capability(q.device)[0] >= 9


def _addressable(x: Tensor, tma: bool) -> Tensor:
    """Return x (B, T, H, D), copied if the kernels cannot address its strides."""
    B, T, H, D = x.shape
    if x.stride(3) != 1 or not tma:
        return x if x.stride(3) == 1 else x.contiguous()
    _, st, sh, _ = x.stride()
    aligned = all(s * x.element_size() % 16 == 0 for s in (st, sh)) and x.data_ptr() % 16 == 0
    one_matrix = (B == 1 or x.stride(0) == T * st) and D <= sh and (H - 1) * sh + D <= st
    return x if aligned and one_matrix else x.clone(memory_format=torch.contiguous_format)


def _operand(x: Tensor, rows: int, tma: bool) -> Tensor | TensorDescriptor:
    """Return the tensor, or its tensor map of (B·T, columns) in boxes of `rows` tokens."""
    if not tma:
        return x
    B, T, H, D = x.shape
    return TensorDescriptor(x, [B * T, (H - 1) * x.stride(2) + D], [x.stride(1), 1], [rows, D])
