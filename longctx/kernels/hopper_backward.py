"""FlashAttention backward for Hopper in Gluon: one pass over the keys, five matrix products.

Equations, letters and masks are those of portable.py; compare FlashAttention-3 (arXiv 2407.08608).

A program owns BN keys of one key-value head, its two consumer warpgroups 64 each. Its walk (see
hopper_order.py) goes over the queries that see them, for all query heads of the group, so that dk
and dv need no atomics. Scores are computed transposed, which makes p and ds register operands of dv
and dk. ds also goes through shared memory, where both consumers meet: each forms half of the tile's
dq, half of its columns or of its queries, one tile later, so that no consumer waits for the other's
ds. Each consumer has a writer warp that adds its part of dq, in fp32, to sums in global memory by
TMA, once more a tile later, when nobody has to wait for the part's way to shared memory. The sums
lie in the order in which products leave them in registers; the last kernel sorts and scales them.
The writer also stores dk and dv. One more warp, the producer, loads. The next tile's scores are in
flight meanwhile; consumers take turns, so that one has products while the other has exponentials.

The sum over key tiles arrives in any order, so dq may differ in its last bits from run to run.
Ordered, it does not: hopper_order.py.

Buffers in shared memory: qs, dos, lses, deltas (two slots, by step), ks, vs, dss (ds, two slots),
dq_parts. mbarriers: X_full, X has been written; X_empty, X has been read. More than 196 KiB of
shared memory, which leaves 28 KiB of L1 cache, made the same code 4 to 7% slower; no config takes
it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longctx.kernels.gluon import reinterpret, shared_layout, tma_add, tma_load, tma_store
from longctx.kernels.hopper_order import (
    consumer_walk,
    key_tile,
    predecessor,
    query_tile,
    query_tiles,
    release,
)
from longctx.kernels.hopper_primitives import (
    addressable,
    bar_arrive,
    bar_sync,
    descriptor,
    mask_scores,
    pop,
    processors,
    push,
)
from longctx.kernels.portable import LOG2E, padded_rows, preprocess_into
from longctx.kernels.relaunch import Relaunch, first_launch, keep, stream_of, zero
from longctx.kernels.tile_schedule import batch_stride, heads_in_l2


class Config(NamedTuple):
    """BM queries and BN keys of a tile, registers of a consumer.

    `fence_last`: a consumer makes its ds visible to matrix products once the next scores are in
    flight, not before.
    """

    BM: int
    BN: int
    registers: int
    fence_last: bool


CONFIGS = {64: Config(128, 128, 240, True), 128: Config(64, 128, 240, False)}  # by head size
ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
KEYS = gl.constexpr(64)  # of a consumer warpgroup
# Of the hardware's 16 named barriers Triton takes 0 to 5 for five partitions. They cost less than
# an mbarrier's arrival, for which the consumer's warps wait for one another.
TURN = gl.constexpr(6)  # 6 + 9 · consumer: it may issue its products
OUTPUT_FULL = gl.constexpr(7)  # 7 + consumer: its part of dq, or its dk and dv, are written
DS_FULL = gl.constexpr(9)  # 9 + 2 · consumer + tile & 1: its half of ds is written
Q_DO_EMPTY = gl.constexpr(13)  # 13 + tile & 1: q and do have been read


@gluon.jit
def load_keys(x, xs, full, empty, count, b, n0, h):
    """Load a tile of k or v, in one box or one for each consumer, once its place is empty."""
    BOXES: gl.constexpr = xs.shape[0]
    N: gl.constexpr = xs.shape[1]
    D: gl.constexpr = xs.shape[2]
    mbarrier.wait(empty, (count & 1) ^ 1)
    mbarrier.expect(full, BOXES * N * D * 2)
    for i in gl.static_range(BOXES):
        tma_load(x, [b, n0 + i * N, h, 0], full, xs.index(i).reshape([1, N, 1, D]))


@gluon.jit
def producer(
    q, k, v, do, lse2, delta,
    qs, ks, vs, dos, lses, deltas,
    q_full, do_full, k_full, k_empty, v_full, v_empty,
    queue, queue_full, queue_empty,
    counter, qfirst, qlast, stride_ib,
    Tq, Tk, Hq, tiles, heads, l2_heads,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr,
):  # fmt: skip
    """Hands out tiles of keys, and loads them and the queries of their walks."""
    Hkv = Hq // GROUP
    it = 0
    count = 0
    t = gl.program_id(0)
    if ORDERED:  # a program that does not run yet must own no tile: others would wait for it
        t = gl.atomic_add(counter, 1)
    while t < tiles * heads:
        push(queue, queue_full, queue_empty, count, t)
        b, hk, n0, down = key_tile(
            t, tiles, qlast, stride_ib, Tk, Hkv, heads, l2_heads, BN, ORDERED
        )
        lo, n = query_tiles(qfirst + b * stride_ib, qlast + b * stride_ib, n0, Tk, BM, BN)
        for x in range(n * GROUP):
            h = hk * GROUP + x % GROUP
            m0 = query_tile(x, lo, n, down, GROUP, DIRECTIONS) * BM
            s = it & 1
            if it >= 2:
                bar_sync(Q_DO_EMPTY + s, 288)
            mbarrier.expect(q_full.index(s), BM * D * 2 + BM * 4)
            tma_load(q, [b, m0, h, 0], q_full.index(s), qs.index(s).reshape([1, BM, 1, D]))
            tma_load(lse2, [b * Hq + h, m0], q_full.index(s), lses.index(s))
            if x == 0:
                load_keys(k, ks, k_full, k_empty, count, b, n0, hk)
            mbarrier.expect(do_full.index(s), BM * D * 2 + BM * 4)
            tma_load(do, [b, m0, h, 0], do_full.index(s), dos.index(s).reshape([1, BM, 1, D]))
            tma_load(delta, [b * Hq + h, m0], do_full.index(s), deltas.index(s))
            if x == 0:
                load_keys(v, vs, v_full, v_empty, count, b, n0, hk)
            it += 1
        if n == 0:  # consumers wait for k and v even of keys that nobody sees
            load_keys(k, ks, k_full, k_empty, count, b, n0, hk)
            load_keys(v, vs, v_full, v_empty, count, b, n0, hk)
        t = gl.atomic_add(counter, 1)
        if not ORDERED:
            t += gl.num_programs(0)
        count += 1
    push(queue, queue_full, queue_empty, count, -1)
    # leave no arrival behind at a named barrier
    for x in range(gl.maximum(it - 2, 0), it):
        bar_sync(Q_DO_EMPTY + (x & 1), 288)


@gluon.jit
def start_dq(ds, k, BM: gl.constexpr, C: gl.constexpr):
    """Issue the product of a consumer's part of a tile's dq, (64, 64).

    The part is half the columns of 64 queries, or all columns of 64 of 128 queries.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    zeros = gl.zeros([64, 64], gl.float32, layout=layout)
    if BM == 64:
        dq = warpgroup_mma(
            ds.permute((1, 0)), k.slice(C * 64, 64, dim=1), zeros, use_acc=False, is_async=True
        )
    else:
        dq = warpgroup_mma(
            ds.slice(C * 64, 64, dim=1).permute((1, 0)), k, zeros, use_acc=False, is_async=True
        )
    return dq


@gluon.jit
def register_order(x):
    """x (64, 64), a matrix product, as (16, 256) in the order of registers.

    16 bytes of each thread and 512 of each warp are side by side, so that no bank is asked twice.
    """
    # rows: warp, half of its rows, row; columns: group, thread, one of two
    x = x.reshape([4, 2, 8, 8, 4, 2])
    return x.permute((3, 0, 2, 4, 1, 5)).reshape([16, 256])


@gluon.jit
def output_buffers(stages, vs, it, D: gl.constexpr, BM: gl.constexpr, C: gl.constexpr):
    """Where a consumer's dv and dk leave from after `it` steps.

    Of 64 channels they fit into the place of the next ds, and k and v can be loaded meanwhile.
    Otherwise they take the places of v and of parts of dq.
    """
    dv = stages.index(4 * (it & 1) + C) if BM >= 2 * D else vs.index(C)
    dk = stages.index(4 * (it & 1) + C + 2) if BM >= 2 * D else stages.index(C)
    return dv, dk


@gluon.jit
def writer(
    dq, dk, dv,
    dq_part, stages, vs,
    output_empty, v_empty,
    queue, queue_full, queue_empty,
    semaphores, qfirst, qlast, stride_ib,
    Tq, Tk, Hq, tiles, heads, l2_heads,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Adds the parts of dq of consumer C to memory and stores its dk and dv."""
    it = 0
    count = 0
    t = pop(queue, queue_full, queue_empty, count, 1)
    while t >= 0:
        b, hk, n0, down = key_tile(
            t, tiles, qlast, stride_ib, Tk, Hq // GROUP, heads, l2_heads, BN, ORDERED
        )
        lo, n = query_tiles(qfirst + b * stride_ib, qlast + b * stride_ib, n0, Tk, BM, BN)
        from_query, to_query, before = predecessor(
            qfirst + b * stride_ib, qlast + b * stride_ib, n0, Tk, down, BN
        )

        # dq, step by step
        for x in range(n * GROUP):
            m = query_tile(x, lo, n, down, GROUP, DIRECTIONS)
            at = 2 * ((b * Hq + hk * GROUP + x % GROUP) * gl.cdiv(Tq, BM) + m) + C
            if ORDERED and ((m + 1) * BM > from_query) & (m * BM <= to_query):
                # It need not acquire: nothing is read that others wrote; sums are added in L2, and
                # this one is sent after it.
                while gl.load(semaphores + at, volatile=True) != before:
                    pass
            bar_sync(OUTPUT_FULL + C, 160)
            tma_add(dq, [at * 16, 0], dq_part)
            tma.store_wait(0)
            mbarrier.arrive(output_empty, count=1)
            if ORDERED:
                release(semaphores + at, n0, BN)

        # dk and dv, once per walk
        it += n * GROUP
        bar_sync(OUTPUT_FULL + C, 160)
        dv_own, dk_own = output_buffers(stages, vs, it, D, BM, C)
        at = [b, n0 + C * KEYS, hk, 0]
        tma_store(dv, at, dv_own.reshape([1, KEYS, 1, D]))
        tma_store(dk, at, dk_own.reshape([1, KEYS, 1, D]))
        tma.store_wait(0)
        mbarrier.arrive(output_empty, count=1)
        if BM < 2 * D:
            mbarrier.arrive(v_empty, count=1)
        count += 1
        t = pop(queue, queue_full, queue_empty, count, 1)


@gluon.jit
def signal_writer(ready, C: gl.constexpr):
    """Tell the writer, if `ready`, that its consumer's output is in shared memory."""
    if ready:
        fence_async_shared()
        bar_arrive(OUTPUT_FULL + C, 160)


@gluon.jit
def step(
    s, dk, dv,
    ks, vs, qs, dos, lses, deltas, dss, dq_part,
    m0, output_empty, q_full, do_full,
    it, count, zero, x, more,
    qfirst_j, qlast_j, last_first, first_last, scale_log2,
    D: gl.constexpr, BM: gl.constexpr, FENCE_LAST: gl.constexpr, ONE_IF: gl.constexpr,
    PINGPONG: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Step x of a walk, one tile of queries: the next tile's scores, and the new dk, dv.

    The scores `s` of this tile are there. Meanwhile dq of the tile before is formed, and the writer
    is told of the one before that. A consumer says that its ds is written once it has used both ds
    of the tile before, so that the next ds may take their place.

    `ONE_IF`: one `if` around both halves of the mask. `it & zero` is 0, which the compiler does not
    know: else it would keep the descriptors of k and v in registers, and spill others.
    """
    dtype: gl.constexpr = qs.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    a_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=a_layout, k_width=2)
    zeros = gl.zeros([KEYS, BM], gl.float32, layout=s_layout)
    now, after = it & 1, (it + 1) & 1

    # mask, where the tile has queries that do not see all keys
    if not ONE_IF or (m0 < last_first) | (m0 + BM - 1 > first_last):
        s = mask_scores(s, m0, qfirst_j, qlast_j, m0 < last_first, m0 + BM - 1 > first_last)

    # dp = v·doᵀ in flight, p = exp(s - lse)
    mbarrier.wait(do_full.index(now), (it >> 1) & 1)
    dp_async = warpgroup_mma(
        vs.index(C + (it & zero)),
        dos.index(now).permute((1, 0)),
        zeros,
        use_acc=False,
        is_async=True,
    )
    p = gl.exp2(s * scale_log2 - lses.index(now).load(s_layout))
    if not PINGPONG and C == 0:  # noqa: SIM102, the first is known when compiling
        if x == 0:
            bar_arrive(TURN + 9, 256)
    signal_writer(x > 1, C)

    # dv += p·do, ds = p (dp - delta), dk += ds·q
    p16 = gl.convert_layout(p.to(dtype), p_layout)
    dv_async = warpgroup_mma(p16, dos.index(now), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp_async,))
    ds = (p * (dp - deltas.index(now).load(s_layout))).to(dtype)
    dk_async = warpgroup_mma(gl.convert_layout(ds, p_layout), qs.index(now), dk, is_async=True)

    # ds to shared memory, once the other consumer has used the ds before it
    if x > 0:
        bar_sync(DS_FULL + 2 * (1 - C) + after, 256)
    dss.index(now).slice(C * KEYS, KEYS, dim=0).store(ds)
    if not FENCE_LAST:
        fence_async_shared()

    # dq of the tile before, and the next tile's scores
    if PINGPONG:
        bar_sync(TURN + 9 * C, 256)
    dq_async = start_dq(dss.index(after), ks.index(it & zero), BM, C)
    dk, dv = warpgroup_mma_wait(1, deps=(dk_async, dv_async))
    bar_arrive(Q_DO_EMPTY + now, 288)
    mbarrier.wait(q_full.index(after), ((it + 1) >> 1) & 1, pred=more)
    k = ks.index(it & zero).slice(C * KEYS, KEYS, dim=0)
    s_async = warpgroup_mma(k, qs.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq_async,))
    if FENCE_LAST:
        fence_async_shared()
    bar_arrive(DS_FULL + 2 * C + now, 256)
    if x > 0:
        mbarrier.wait(output_empty, (it + count) & 1)
        dq_part.store(register_order(dq))
    s = warpgroup_mma_wait(0, deps=(s_async,))
    if PINGPONG:
        bar_arrive(TURN + 9 * (1 - C), 256)
    return s, dk, dv


@gluon.jit
def consumer(
    qs, ks, vs, dos, lses, deltas, dss, dq_part, stages,
    q_full, do_full, k_full, k_empty, v_full, v_empty, output_empty,
    queue, queue_full, queue_empty,
    qfirst, qlast, stride_ib, scale, scale_log2,
    Tk, Hq, tiles, heads, l2_heads, zero,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    FENCE_LAST: gl.constexpr, ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C: dk and dv of its 64 keys of each tile, and its part of dq at every step."""
    dtype: gl.constexpr = qs.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    a_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    zeros = gl.zeros([KEYS, BM], gl.float32, layout=s_layout)
    OUTPUT_IN_DS: gl.constexpr = BM >= 2 * D  # see output_buffers
    # slower at 64 channels, but takes fewer registers
    ONE_IF: gl.constexpr = D == 128 or (ORDERED and GROUP > 1)
    # at every step; else at the first of a walk, which keeps consumers that far apart
    PINGPONG: gl.constexpr = D == 128
    if PINGPONG and C == 1:
        bar_arrive(TURN, 256)
    it = 0
    count = 0
    t = pop(queue, queue_full, queue_empty, count, 4)
    m0, n, down, qfirst_j, qlast_j, last_first, first_last = consumer_walk(
        gl.maximum(t, 0), qfirst, qlast, stride_ib,
        tiles, Tk, Hq // GROUP, heads, l2_heads,
        BM, BN, ORDERED, DIRECTIONS, C, KEYS, s_layout,
    )  # fmt: skip
    while t >= 0:
        dk = gl.zeros([KEYS, D], gl.float32, layout=a_layout)
        dv = gl.zeros([KEYS, D], gl.float32, layout=a_layout)
        mbarrier.wait(k_full, count & 1)
        if n > 0:
            # prologue: the scores of the first tile of queries
            mbarrier.wait(q_full.index(it & 1), (it >> 1) & 1)
            if not PINGPONG and C == 1:
                bar_sync(TURN + 9, 256)
            # `& zero`: as in `step`
            k_own = ks.index((it if ORDERED or GROUP > 1 else count) & zero).slice(
                C * KEYS, KEYS, dim=0
            )
            s_async = warpgroup_mma(
                k_own, qs.index(it & 1).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full, count & 1)
            if OUTPUT_IN_DS:
                mbarrier.wait(output_empty, (it + count + 1) & 1)
            s = warpgroup_mma_wait(0, deps=(s_async,))

            # steady state
            for x in range(n * GROUP):
                s, dk, dv = step(
                    s, dk, dv,
                    ks, vs, qs, dos, lses, deltas, dss, dq_part,
                    m0, output_empty, q_full, do_full,
                    it, count, zero, x, x + 1 < n * GROUP,
                    qfirst_j, qlast_j, last_first, first_last, scale_log2,
                    D, BM, FENCE_LAST, ONE_IF, PINGPONG, C,
                )  # fmt: skip
                it += 1
                if (x + 1) % GROUP == 0:
                    m0 += gl.where(down, -BM, BM) if DIRECTIONS == 2 else BM

            # dq of the last tile
            signal_writer(n * GROUP > 1, C)
            bar_sync(DS_FULL + 2 * (1 - C) + ((it - 1) & 1), 256)
            dq_async = start_dq(
                dss.index((it + 1) & 1),
                ks.index((count if ORDERED or GROUP > 1 else it) & zero),
                BM,
                C,
            )
            dq = warpgroup_mma_wait(0, deps=(dq_async,))
            mbarrier.wait(output_empty, (it + count) & 1)
            dq_part.store(register_order(dq))
            signal_writer(True, C)
        else:
            mbarrier.wait(v_full, count & 1)

        # epilogue: dk and dv
        mbarrier.arrive(k_empty, count=1)
        if OUTPUT_IN_DS:
            mbarrier.arrive(v_empty, count=1)
        dv_own, dk_own = output_buffers(stages, vs, it, D, BM, C)
        dv_out, dk_out = dv.to(dtype), (dk * scale).to(dtype)
        mbarrier.wait(output_empty, (it + count + 1) & 1)
        dv_own.store(dv_out)
        dk_own.store(dk_out)
        signal_writer(True, C)

        # what the next walk needs is on its way while the output of this one leaves
        count += 1
        t = pop(queue, queue_full, queue_empty, count, 4)
        m0, n, down, qfirst_j, qlast_j, last_first, first_last = consumer_walk(
            gl.maximum(t, 0), qfirst, qlast, stride_ib,
            tiles, Tk, Hq // GROUP, heads, l2_heads,
            BM, BN, ORDERED, DIRECTIONS, C, KEYS, s_layout,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["Tq", "Tk", "Hq", "tiles", "heads", "l2_heads", "zero"])
def backward_kernel(
    q, k, v, do, lse2, delta,
    dq, dk, dv,
    semaphores, counter, qfirst, qlast, stride_ib, scale, scale_log2,
    Tq, Tk, Hq, tiles, heads, l2_heads, zero,
    q_shared: gl.constexpr, k_shared: gl.constexpr, v_shared: gl.constexpr,
    ds_shared: gl.constexpr, row_shared: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    FENCE_LAST: gl.constexpr, ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv (B, Tk, Hkv, D) and, added to the zeros in dq, dq without the scale.

    The first nine are tensor maps. dq: fp32, for each head and tile of queries 32 rows of 256, of
    which each consumer adds 16 (see `register_order`). `counter`: 0. `semaphores`, ordered: an
    int32, 0, for each 16 rows of dq.
    """
    # shared memory
    dtype: gl.constexpr = q.dtype
    one_int: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    qs = gl.allocate_shared_memory(dtype, [2, BM, D], q_shared)
    dos = gl.allocate_shared_memory(dtype, [2, BM, D], q_shared)
    ks = gl.allocate_shared_memory(dtype, [1, BN, D], k_shared)
    vs = gl.allocate_shared_memory(dtype, [2, KEYS, D], v_shared)
    lses = gl.allocate_shared_memory(gl.float32, [2, 1, BM], row_shared)
    deltas = gl.allocate_shared_memory(gl.float32, [2, 1, BM], row_shared)
    dss = gl.allocate_shared_memory(dtype, [2, BN, BM], ds_shared)
    dq_parts = gl.allocate_shared_memory(gl.float32, [2, 16, 256], row_shared)
    # see output_buffers
    stages = reinterpret(
        dss if BM >= 2 * D else dq_parts, dtype, [8 if BM >= 2 * D else 2, KEYS, D], v_shared
    )
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    output_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], one_int)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    mbarrier.init(k_empty, count=2)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(queue_full.index(i), count=1)
        mbarrier.init(queue_empty.index(i), count=4)
        mbarrier.init(output_empty.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)

    # warps
    # fmt: off
    gl.warp_specialize([
        (consumer, (
            qs, ks, vs, dos, lses, deltas, dss, dq_parts.index(0), stages,
            q_full, do_full, k_full, k_empty, v_full, v_empty, output_empty.index(0),
            queue, queue_full, queue_empty,
            qfirst, qlast, stride_ib, scale, scale_log2,
            Tk, Hq, tiles, heads, l2_heads, zero,
            GROUP, D, BM, BN, FENCE_LAST, ORDERED, DIRECTIONS, 0,
        )),
        (consumer, (
            qs, ks, vs, dos, lses, deltas, dss, dq_parts.index(1), stages,
            q_full, do_full, k_full, k_empty, v_full, v_empty, output_empty.index(1),
            queue, queue_full, queue_empty,
            qfirst, qlast, stride_ib, scale, scale_log2,
            Tk, Hq, tiles, heads, l2_heads, zero,
            GROUP, D, BM, BN, FENCE_LAST, ORDERED, DIRECTIONS, 1,
        )),
        (producer, (
            q, k, v, do, lse2, delta,
            qs, ks, vs, dos, lses, deltas,
            q_full, do_full, k_full, k_empty, v_full, v_empty,
            queue, queue_full, queue_empty,
            counter, qfirst, qlast, stride_ib,
            Tq, Tk, Hq, tiles, heads, l2_heads,
            GROUP, D, BM, BN, ORDERED, DIRECTIONS,
        )),
        (writer, (
            dq, dk, dv,
            dq_parts.index(0), stages, vs,
            output_empty.index(0), v_empty,
            queue, queue_full, queue_empty,
            semaphores, qfirst, qlast, stride_ib,
            Tq, Tk, Hq, tiles, heads, l2_heads,
            GROUP, D, BM, BN, ORDERED, DIRECTIONS, 0,
        )),
        (writer, (
            dq, dk, dv,
            dq_parts.index(1), stages, vs,
            output_empty.index(1), v_empty,
            queue, queue_full, queue_empty,
            semaphores, qfirst, qlast, stride_ib,
            Tq, Tk, Hq, tiles, heads, l2_heads,
            GROUP, D, BM, BN, ORDERED, DIRECTIONS, 1,
        )),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])
    # fmt: on


@triton.jit(do_not_specialize=["T", "H"])
def unpack_kernel(sums, out, scale, T, H, D: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr):
    """out (B, T, H, D) = scale · sums (B, H, tiles, BM · PAD), which is in `register_order`."""
    tile, tiles = tl.program_id(0), tl.cdiv(T, BM)
    m, bh = tile % tiles, tile // tiles
    x = tl.load(sums + tile.to(tl.int64) * BM * PAD + tl.arange(0, BM * PAD)) * scale
    # consumer, then as register_order permutes
    x = x.to(out.dtype.element_ty).reshape([2, 8, 4, 8, 4, 2, 2])
    x = x.permute((2, 5, 3, 0, 1, 4, 6) if BM == 64 else (0, 2, 5, 3, 1, 4, 6)).reshape([BM, PAD])
    i, c = m * BM + tl.arange(0, BM)[:, None], tl.arange(0, PAD)[None, :]
    inside = (i < T) & (c < D)
    tl.store(out + (((bh // H).to(tl.int64) * T + i) * H + bh % H) * D + c, x, mask=inside)


def directions(head_dim: int, group: int, ordered: bool) -> int:
    """2 where walks go down as well as up, see hopper_order.py.

    At 64 channels the registers that it takes cost more than it saves.
    """
    return 2 if ordered or (head_dim == 128 and group > 1) else 1


class Launches(NamedTuple):
    """How to compute a shape again: the kernels, how many 32-bit values they need, of which so many
    are zeroed, and the entry of CONFIGS that they were made with.
    """

    PAD: int
    config: Config
    sums: int  # of dq
    zeroed: int  # sums, the counter, padded to 16 bytes, then the semaphores, padded likewise
    rows: int  # of lse2, and of delta, which follow
    preprocess: Relaunch
    main: Relaunch
    unpack: Relaunch


_launches: dict[Hashable, Launches] = {}


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    last: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    scale: float,
    ordered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous, for the keys' intervals qfirst, qlast (B or 1, Tk).

    `ordered`: dq, too, has the same bits every time. `first` and `last` are not used.
    """
    device = q.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return backward(do, dlse, q, k, v, out, lse, first, last, qfirst, qlast, scale, ordered)
    if dlse is not None:
        dlse = dlse.contiguous()
    pointers = out, do, lse, lse if dlse is None else dlse
    q_at, k_at, v_at, *ends = [x.data_ptr() for x in (q, k, v, qfirst, qlast)]
    out_at, do_at, lse_at, dlse_at = given = [x.data_ptr() for x in pointers]
    key = (
        *(q.shape, k.shape, q.stride(), k.stride(), v.stride(), do.stride(), out.stride()),
        *(q.dtype, device, scale, ordered, dlse is None, qfirst.shape, qfirst.stride()),
        *(ends[0] % 16, ends[1] % 16, out_at % 16, lse_at % 16, dlse_at % 16),
    )
    launches = _launches.get(key)
    aligned = (q_at | k_at | v_at | do_at) % 16 == 0
    if launches is None or not aligned or launches.config is not CONFIGS[launches.PAD]:
        intervals = qfirst, qlast
        return _first_backward(q, k, v, do, dlse, out, lse, intervals, scale, ordered, key)
    dq, dk, dv = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    _, _, sums, zeroed, rows, preprocess, main, unpack = launches
    buffer = torch.empty(zeroed + 2 * rows, dtype=torch.float32, device=q.device)
    stream, at = stream_of(device), buffer.data_ptr()
    zero(buffer, zeroed, stream)
    end, lse2_at, dq_at = at + 4 * sums, at + 4 * zeroed, dq.data_ptr()
    delta_at = lse2_at + 4 * rows
    preprocess(stream, (), *given, lse2_at, delta_at)
    mapped = q_at, k_at, v_at, do_at, lse2_at, delta_at, at, dk.data_ptr(), dv.data_ptr()
    main(stream, mapped, end + 16 if ordered else end, end, *ends)
    unpack(stream, (), at, dq_at)
    return dq, dk, dv


def _first_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    intervals: tuple[Tensor, Tensor],
    scale: float,
    ordered: bool,
    key: Hashable,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward`, for a shape that has not been computed yet or that needs a copy."""
    addressed = [addressable(x) for x in (q, k, v, do)]
    if any(x is not y for x, y in zip(addressed, (q, k, v, do), strict=True)):
        q, k, v, do = addressed
        return backward(do, dlse, q, k, v, out, lse, *intervals, *intervals, scale, ordered)
    B, Tq, Hq, D = q.shape
    PAD = max(64, 1 << (D - 1).bit_length())
    c = CONFIGS[PAD]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    parts = B * Hq * triton.cdiv(Tq, c.BM) * (c.BM * PAD // 256)
    semaphores = parts // 16 if ordered else 0
    zeroed = parts * 256 + 4 + triton.cdiv(semaphores, 4) * 4
    rows = padded_rows(lse)
    buffer = torch.empty(zeroed + 2 * rows.numel(), dtype=torch.float32, device=q.device)
    sums = buffer[:zeroed].zero_()
    lse2, delta = buffer[zeroed:].view(2, *rows).unbind()
    before = preprocess_into(lse2, delta, do, dlse, out, lse)
    tensors = q, k, v, do, lse2, delta, sums, dk, dv
    main, unpack = _first_launches(tensors, dq, *intervals, scale, c, PAD, ordered)
    assert before is not None, "Gluon has no interpreter"
    launches = Launches(PAD, c, parts * 256, zeroed, rows.numel(), before, main, unpack)
    keep(_launches, key, launches)
    return dq, dk, dv


def _first_launches(
    tensors: tuple[Tensor, ...],
    dq: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    scale: float,
    c: Config,
    PAD: int,
    ordered: bool,
) -> tuple[Relaunch, Relaunch]:
    """Launch both kernels; `tensors` are those that have tensor maps."""
    q, k, v, do, lse2, delta, sums, dk, dv = tensors
    B, Tq, Hq, _D = q.shape
    Tk, Hkv = k.shape[1:3]
    group = Hq // Hkv
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    dq_tiles = B * Hq * triton.cdiv(Tq, c.BM)
    parts = dq_tiles * (c.BM * PAD // 256)
    tiles = triton.cdiv(Tk, c.BN)
    ints = sums[256 * parts :].view(torch.int32)
    boxes = (q, c.BM), (k, c.BN), (v, 64), (do, c.BM)
    rows = B * Hq, lse2.shape[2]
    maps = [
        *(descriptor(x, n, PAD, dtype) for x, n in boxes),
        *(TensorDescriptor(x, [*rows], [rows[1], 1], [1, c.BM], ROW_LAYOUT) for x in (lse2, delta)),
        TensorDescriptor(sums, [parts, 256], [256, 1], [16, 256], ROW_LAYOUT),
        *(descriptor(x, 64, PAD, dtype) for x in (dk, dv)),
    ]
    again = first_launch(
        backward_kernel,
        min(tiles * B * Hkv, processors(q.device)),
        maps,
        (ints[4 if ordered else 0 :], ints, qfirst, qlast),
        (
            batch_stride(qfirst),
            scale,
            scale * LOG2E.value,
            Tq,
            Tk,
            Hq,
            tiles,
            B * Hkv,
            heads_in_l2(q, B * Hkv, 1),
            0,
        ),
        dict(
            q_shared=shared_layout((c.BM, PAD), dtype),
            k_shared=shared_layout((c.BN, PAD), dtype),
            v_shared=shared_layout((64, PAD), dtype),
            ds_shared=shared_layout((c.BN, c.BM), dtype),
            row_shared=ROW_LAYOUT,
            GROUP=group,
            D=PAD,
            BM=c.BM,
            BN=c.BN,
            FENCE_LAST=c.fence_last,
            ORDERED=ordered,
            DIRECTIONS=directions(PAD, group, ordered),
            REGISTERS=c.registers,
        ),
        num_warps=4,
    )
    unpack = first_launch(
        unpack_kernel,
        dq_tiles,
        (),
        (sums, dq),
        (scale, Tq, Hq),
        dict(D=q.shape[3], PAD=PAD, BM=c.BM),
        num_warps=8,
    )
    assert again is not None and unpack is not None, "Gluon has no interpreter"
    return again, unpack
