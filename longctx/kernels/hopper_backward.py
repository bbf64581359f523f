"""FlashAttention backward for Hopper in Gluon: one pass over the keys, five matrix products, dq added up by TMA.

Equations, letters and masks are those of portable.py. A program owns BN keys of one key-value head, its two consumers 64 each; it
walks over the queries that see them, for all query heads of the group, so that dk and dv need no atomics. Scores are computed
transposed, which makes p and ds register operands of dv and dk. ds also goes through shared memory, where both consumers meet:
each multiplies it with half of the columns of k and adds its half of dq, in fp32, to global memory by TMA. The sum over key tiles
arrives in any order, so dq may differ in its last bits from run to run. The next tile's scores are in flight while dq leaves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longctx.kernels.hopper_forward import addressable, bar_sync, descriptor, processors, receive, send
from longctx.kernels.portable import LOG2E, rows_of_backward
from longctx.kernels.walk import batch_stride, boundary, heads_together, place, walk

BM, BN, STAGES, CONSUMER_REGISTERS = 64, 128, 2, 240
KEYS = gl.constexpr(64)  # of a consumer warpgroup


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory; Gluon has it under a name of its own from Triton 3.9 on."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def owned_keys(t, tiles, qfirst, qlast, stride_ib, Tk, Hkv, heads, together, BM: gl.constexpr, BN: gl.constexpr):
    """Tile t of the schedule: row b, key-value head hk, first key n0, and the tiles of queries to walk over."""
    rank, bh = place(t, tiles, heads, together)
    n0 = rank * BN
    b = bh // Hkv
    hk = bh % Hkv
    lo, full_lo, full_hi, masked = walk(qfirst + b * stride_ib, qlast + b * stride_ib, n0, gl.minimum(n0 + BN, Tk), BM)
    return b, hk, n0, lo, full_lo, full_hi, masked


@gluon.jit
def producer(
    q, k, v, do, lse2, delta, qs, ks, vs, dos, lses, deltas, qf, qe, dof, kvf, kve, mail, mf, me, counter, qfirst, qlast, stride_ib,
    Tk, Hq, heads, together, GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles = gl.cdiv(Tk, BN)
    Hkv = Hq // GROUP
    it = 0
    done = 0
    t = gl.program_id(0)
    while t < tiles * heads:
        send(mail, mf, me, done, t)
        b, hk, n0, lo, full_lo, full_hi, masked = owned_keys(
            t, tiles, qfirst, qlast, stride_ib, Tk, Hkv, heads, together, BM, BN
        )
        n = masked + full_hi - full_lo
        mbarrier.wait(kve, (done & 1) ^ 1)
        mbarrier.expect(kvf, 2 * BN * D * 2)
        tma.async_copy_global_to_shared(k, [b, n0, hk, 0], kvf, ks.reshape([1, BN, 1, D]))
        for c in gl.static_range(2):
            tma.async_copy_global_to_shared(v, [b, n0 + c * KEYS, hk, 0], kvf, vs.index(c).reshape([1, KEYS, 1, D]))
        for x in range(n * GROUP):
            h = hk * GROUP + x // n
            i = x % n
            m0 = gl.where(i < masked, boundary(i, lo, full_lo, full_hi), full_lo + i - masked) * BM
            s = it % STAGES
            mbarrier.wait(qe.index(s), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(qf.index(s), BM * D * 2 + BM * 4)
            tma.async_copy_global_to_shared(q, [b, m0, h, 0], qf.index(s), qs.index(s).reshape([1, BM, 1, D]))
            tma.async_copy_global_to_shared(lse2, [b * Hq + h, m0], qf.index(s), lses.index(s))
            mbarrier.expect(dof.index(s), BM * D * 2 + BM * 4)
            tma.async_copy_global_to_shared(do, [b, m0, h, 0], dof.index(s), dos.index(s).reshape([1, BM, 1, D]))
            tma.async_copy_global_to_shared(delta, [b * Hq + h, m0], dof.index(s), deltas.index(s))
            it += 1
        t = gl.atomic_add(counter, 1) + gl.num_programs(0)
        done += 1
    send(mail, mf, me, done, -1)


@gluon.jit
def step(
    s, dk, dv, k_mine, k_half, v_mine, qs, dos, lses, deltas, dss, stage, dq, b, m0, h, qf, qe, dof, it, more, qfirst_j, qlast_j, scale_log2,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One tile of queries, whose scores `s` are there: adds to dk, dv and to dq in memory, and returns the next tile's scores."""
    dtype: gl.constexpr = qs.dtype
    HALF: gl.constexpr = D // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    a_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    q_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=a_layout, k_width=2)
    zeros = gl.zeros([KEYS, BM], gl.float32, layout=s_layout)
    st = it % STAGES
    q_i = qs.index(st)
    do_i = dos.index(st)
    mbarrier.wait(dof.index(st), (it // STAGES) & 1)
    dpa = warpgroup_mma(v_mine, do_i.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse_i = lses.index(st).load(s_layout)
    p = gl.exp2(s * scale_log2 - lse_i)
    if MASKED:
        i = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, s_layout))
        p = gl.where((i[None, :] >= qfirst_j[:, None]) & (i[None, :] <= qlast_j[:, None]), p, 0.0)
    p16 = p.to(dtype)
    dva = warpgroup_mma(gl.convert_layout(p16, p_layout), do_i, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dpa,))
    delta_i = deltas.index(st).load(s_layout)
    d = (p16.to(gl.float32) * (dp - delta_i)).to(dtype)
    dka = warpgroup_mma(gl.convert_layout(d, p_layout), q_i, dk, is_async=True)
    dss_i = dss.index(it % 2)
    dss_i.slice(C * KEYS, KEYS, dim=0).store(d)
    fence_async_shared()
    bar_sync(9, 256)
    zero_q = gl.zeros([BM, HALF], gl.float32, layout=q_layout)
    dqa = warpgroup_mma(dss_i.permute((1, 0)), k_half, zero_q, use_acc=False, is_async=True)
    dk, dv = warpgroup_mma_wait(1, deps=(dka, dva))
    mbarrier.arrive(qe.index(st), count=1)
    after = (it + 1) % STAGES
    mbarrier.wait(qf.index(after), ((it + 1) // STAGES) & 1, pred=more)
    sa = warpgroup_mma(k_mine, qs.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True)
    dq_i = warpgroup_mma_wait(1, deps=(dqa,))
    tma.store_wait(0)
    stage.store(dq_i)
    fence_async_shared()
    tma_reduce_add(dq, [b, m0, h, C * HALF], stage.reshape([1, BM, 1, HALF]))
    s = warpgroup_mma_wait(0, deps=(sa,))
    return s, dk, dv


@gluon.jit
def consumer(
    dq, dk_out, dv_out, qs, ks, vs, dos, lses, deltas, dss, stages, qf, qe, dof, kvf, kve, mail, mf, me, qfirst, qlast, stride_ib,
    scale, scale_log2, Tk, Hq, heads, together,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = qs.dtype
    HALF: gl.constexpr = D // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    a_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    zeros = gl.zeros([KEYS, BM], gl.float32, layout=s_layout)
    tiles = gl.cdiv(Tk, BN)
    Hkv = Hq // GROUP
    k_mine = ks.slice(C * KEYS, KEYS, dim=0)
    v_mine = vs.index(C)
    k_half = ks.slice(C * HALF, HALF, dim=1)
    stage = stages.index(C)
    it = 0
    done = 0
    t = receive(mail, mf, me, done)
    while t >= 0:
        b, hk, n0, lo, full_lo, full_hi, masked = owned_keys(
            t, tiles, qfirst, qlast, stride_ib, Tk, Hkv, heads, together, BM, BN
        )
        n = masked + full_hi - full_lo
        j = n0 + C * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
        qfirst_j = gl.load(qfirst + b * stride_ib + j, mask=j < Tk, other=0)
        qlast_j = gl.load(qlast + b * stride_ib + j, mask=j < Tk, other=-1)
        dk = gl.zeros([KEYS, D], gl.float32, layout=a_layout)
        dv = gl.zeros([KEYS, D], gl.float32, layout=a_layout)
        mbarrier.wait(kvf, done & 1)
        end = it + n * GROUP
        if n > 0:
            mbarrier.wait(qf.index(it % STAGES), (it // STAGES) & 1)
            sa = warpgroup_mma(k_mine, qs.index(it % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(sa,))
            for g in range(GROUP):
                h = hk * GROUP + g
                for x in range(masked):
                    m0 = boundary(x, lo, full_lo, full_hi) * BM
                    s, dk, dv = step(
                        s, dk, dv, k_mine, k_half, v_mine, qs, dos, lses, deltas, dss, stage, dq, b, m0, h, qf, qe, dof, it, it + 1 < end,
                        qfirst_j, qlast_j, scale_log2, D, BM, BN, STAGES, C, True,
                    )  # fmt: skip
                    it += 1
                for x in range(full_lo, full_hi):
                    s, dk, dv = step(
                        s, dk, dv, k_mine, k_half, v_mine, qs, dos, lses, deltas, dss, stage, dq, b, x * BM, h, qf, qe, dof, it, it + 1 < end,
                        qfirst_j, qlast_j, scale_log2, D, BM, BN, STAGES, C, False,
                    )  # fmt: skip
                    it += 1
        v_mine.store(dv.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv_out, [b, n0 + C * KEYS, hk, 0], v_mine.reshape([1, KEYS, 1, D]))
        tma.store_wait(0)
        v_mine.store((dk * scale).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_out, [b, n0 + C * KEYS, hk, 0], v_mine.reshape([1, KEYS, 1, D]))
        tma.store_wait(0)
        mbarrier.arrive(kve, count=1)
        done += 1
        t = receive(mail, mf, me, done)


@gluon.jit(do_not_specialize=["Tk", "Hq", "heads", "together"])
def backward_kernel(
    q, k, v, do, lse2, delta, dq, dk, dv, counter, qfirst, qlast, stride_ib, scale, scale_log2, Tk, Hq, heads, together,
    q_shared: gl.constexpr, k_shared: gl.constexpr, v_shared: gl.constexpr, ds_shared: gl.constexpr, dq_shared: gl.constexpr, row_shared: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv (B, Tk, Hkv, D) and, added to what is there, dq (B, Tq, Hq, D) fp32 without the scale; all are descriptors."""
    dtype: gl.constexpr = q.dtype
    qs = gl.allocate_shared_memory(dtype, [STAGES, BM, D], q_shared)
    dos = gl.allocate_shared_memory(dtype, [STAGES, BM, D], q_shared)
    ks = gl.allocate_shared_memory(dtype, [BN, D], k_shared)
    vs = gl.allocate_shared_memory(dtype, [2, KEYS, D], v_shared)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], row_shared)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], row_shared)
    dss = gl.allocate_shared_memory(dtype, [2, BN, BM], ds_shared)
    stages = gl.allocate_shared_memory(gl.float32, [2, BM, D // 2], dq_shared)
    qf = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    qe = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dof = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kvf = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kve = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mail = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    mf = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    me = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kvf, count=1)
    mbarrier.init(kve, count=2)
    for i in gl.static_range(2):
        mbarrier.init(mf.index(i), count=1)
        mbarrier.init(me.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(qf.index(i), count=1)
        mbarrier.init(qe.index(i), count=2)
        mbarrier.init(dof.index(i), count=1)
    # fmt: off
    gl.warp_specialize([
        (producer, (q, k, v, do, lse2, delta, qs, ks, vs, dos, lses, deltas, qf, qe, dof, kvf, kve, mail, mf, me, counter,
                    qfirst, qlast, stride_ib, Tk, Hq, heads, together, GROUP, D, BM, BN, STAGES)),
        (consumer, (dq, dk, dv, qs, ks, vs, dos, lses, deltas, dss, stages, qf, qe, dof, kvf, kve, mail, mf, me,
                    qfirst, qlast, stride_ib, scale, scale_log2, Tk, Hq, heads, together, GROUP, D, BM, BN, STAGES, 0)),
        (consumer, (dq, dk, dv, qs, ks, vs, dos, lses, deltas, dss, stages, qf, qe, dof, kvf, kve, mail, mf, me,
                    qfirst, qlast, stride_ib, scale, scale_log2, Tk, Hq, heads, together, GROUP, D, BM, BN, STAGES, 1)),
    ], [4, 4], [REGISTERS, REGISTERS])
    # fmt: on


@triton.jit
def scale_kernel(x, out, scale, n, SIZE: tl.constexpr):
    """out = scale · x, from fp32 to out's type."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, (tl.load(x + at, mask=at < n, other=0.0) * scale).to(out.dtype.element_ty), mask=at < n)


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous, for the keys' intervals (B or 1, Tk); see `portable.backward`."""
    B, _, Hq, D = q.shape
    Tk, Hkv = k.shape[1:3]
    PAD = max(64, triton.next_power_of_2(D))
    q, k, v, do = (addressable(x) for x in (q, k, v, do))
    lse2, delta = (x.view(B * Hq, -1) for x in rows_of_backward(do, dlse, out, lse))
    dk, dv = torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for
    row = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    rows = (TensorDescriptor(x, list(x.shape), list(x.stride()), [1, BM], row) for x in (lse2, delta))
    tiles = triton.cdiv(Tk, BN) * B * Hkv
    with torch.cuda.device(q.device):
        backward_kernel[(min(tiles, processors(q)),)](
            *(descriptor(x, n, PAD, dtype) for x, n in ((q, BM), (k, BN), (v, 64), (do, BM))),
            *rows,
            *(
                descriptor(sums, BM, PAD // 2, gl.float32),
                descriptor(dk, 64, PAD, dtype),
                descriptor(dv, 64, PAD, dtype),
            ),
            *(counter, qfirst, qlast, batch_stride(qfirst), scale, scale * LOG2E.value, Tk, Hq, B * Hkv),
            heads_together(q, B * Hkv, 1),
            *(layout([BM, PAD], dtype), layout([BN, PAD], dtype), layout([64, PAD], dtype), layout([BN, BM], dtype)),
            *(layout([BM, PAD // 2], gl.float32), row),
            **dict(GROUP=Hq // Hkv, D=PAD, BM=BM, BN=BN, STAGES=STAGES, REGISTERS=CONSUMER_REGISTERS),
            num_warps=4,
        )
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale_kernel[(triton.cdiv(dq.numel(), 4096),)](sums, dq, scale, dq.numel(), SIZE=4096, num_warps=8)
    return dq, dk, dv
