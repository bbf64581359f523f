"""FlashAttention backward for Hopper in Gluon: one pass over the keys, five matrix products.

Equations, letters and masks are those of portable.py; compare FlashAttention-3 (arXiv 2407.08608).
Heads of 192 and 256 channels have kernels of their own, hopper_backward_192.py and
hopper_backward_256.py, launched from here; those of 96 have two parts, 64 + 32, as in
hopper_forward.py.

A program owns BN keys of one key-value head, its two consumer warpgroups 64 each. Its walk (see
hopper_order.py) goes over the queries that see them, for all query heads of the group: dk and dv
need no atomics. Scores are computed transposed, so p and ds are register operands of dv and dk. ds
also goes to shared memory, for both consumers: each forms half of a tile's dq, half of its columns
or of its queries, one step later, so that no consumer waits for the other's ds. Step x of a
consumer begins with its s; each product on the left runs during the work beside and below it:

    dp = v·doᵀ                     p = exp(s - lse); tell the writer of dq of step x-2
    dv += p·do                     ds = p (dp - delta), once dp is there
    dk += ds·q                     ds to shared memory; wait for the turn
    dq of step x-1 = dsᵀ·k         release q and do, once dv and dk are there
    s of step x+1 = k·qᵀ           dq to shared memory; once s is there the other has its turn

Each consumer has a writer warp that adds its part of dq, in fp32, to sums in global memory by TMA.
The sums lie in the order in which products leave them in registers; the last kernel sorts and
scales them. The first kernel, which makes delta, zeroes them. In short rows they would leave the
L2 cache until they are needed: there writers zero those of the next group of heads (`zero_ahead`).
The writer also stores dk and dv. One more warp, the producer, loads.

At 128 channels dk and dv take 128 registers of a thread, and with 64 queries s, dp and a part of dq
32 each. At 64 channels dk and dv take half of that, and 128 queries fit. At 96 channels a
consumer's v fits beside them, and dp need not read it from shared memory, whose traffic is the
limit there.

Between two walks a consumer would wait for three things: the other consumer, with whose last ds it
forms dq; the next k and v; the next walk's bounds. So k and v have a second slot, as far as there
is room, and the bounds are looked up before the last dq.

The sum over key tiles arrives in any order, so dq may differ in its last bits from run to run.
Ordered, it does not: hopper_order.py.

Buffers in shared memory, 226 KiB, or 210 at 96 channels: qs, dos, lses, deltas (two slots, by
step), ks, vs (slots by walk), dss (ds, two slots), dq_parts. mbarriers: X_full, X has been written;
X_empty, X has been read.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

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

from longctx.kernels.attention import Gradients, Intervals, Saved, Scores, hopper_size
from longctx.kernels.attention.hopper_backward_192 import backward_192_kernel
from longctx.kernels.attention.hopper_backward_256 import backward_256_kernel
from longctx.kernels.attention.hopper_order import (
    BIAS_ROWS,
    BY_HEAD,
    DOWN,
    IN_TURN,
    Q_DO_EMPTY,
    Buffers,
    TileSchedule,
    barriers,
    bias_of_keys,
    consumer_walk,
    directions,
    key_tile,
    predecessor,
    producer,
    query_tile,
    release_sent,
    wait_keys,
    zero_ahead,
)
from longctx.kernels.attention.hopper_primitives import (
    HIDDEN_TANH,
    ROW_LAYOUT,
    addressable,
    at_index,
    bar_arrive,
    bar_sync,
    descriptor,
    exponents,
    finished,
    map_of_rows,
    mask_scores,
    mbarriers,
    of_bias,
    part_buffers,
    pop,
    register_order,
    reinterpret,
    shared_layout,
    softcapped,
    split,
    start_scores,
    start_sum,
    store_parts,
    tma_add,
    unpacked_product,
    zero_parts,
    zero_product,
)
from longctx.kernels.attention.launch import multiprocessors
from longctx.kernels.attention.portable import (
    LOG2E,
    batch_stride,
    heads_in_l2,
    padded_rows,
    preprocess_into,
    sink_parts,
)
from longctx.kernels.attention.relaunch import LAUNCHES, Relaunch, first_launch, stream_of


class BackwardConfig(NamedTuple):
    """BM queries and BN keys of a tile, registers of a consumer, slots of k and of v: constants of
    the kernel, by these names in capitals. The others are as in `Large`.
    """

    BM: int
    BN: int
    registers: int
    k_slots: int
    v_slots: int
    intervals = 2
    maps_sums = True


CONFIGS = {  # by head size; larger ones have none
    64: BackwardConfig(128, 128, 240, 2, 2),
    96: BackwardConfig(64, 128, 240, 2, 2),
    128: BackwardConfig(64, 128, 240, 1, 2),
}


class Large(NamedTuple):
    """The kernel for heads of more than 128 channels, its tiles and its tensor maps."""

    kernel: Any
    BM: int
    BN: int
    box: int  # of the keys, in a tensor map
    width: int  # channels of a tensor map
    intervals: int  # the last so many of the four are arguments
    maps_sums: bool  # it adds to the sums of dq by a tensor map


LARGE = {
    192: Large(backward_192_kernel, 64, 96, 32, 64, 4, True),
    256: Large(backward_256_kernel, 64, 64, 64, 128, 2, False),
}
KEYS = gl.constexpr(64)  # of a consumer warpgroup
LONG = 4096  # keys, from which on walks compute for longer than HBM takes for their tiles
# Of the hardware's 16 named barriers Triton takes 0 to 5 for five partitions. They cost less than
# an mbarrier's arrival, for which the consumer's warps wait for one another.
TURN = gl.constexpr(6)  # 6 + 9 · consumer: it may issue its products
OUTPUT_FULL = gl.constexpr(7)  # 7 + consumer: its part of dq, or its dk and dv, are written
DS_FULL = gl.constexpr(9)  # 9 + 2 · consumer + tile & 1: its half of ds is written
# 13 and 14: Q_DO_EMPTY


@gluon.jit
def start_dq(ds, ks, at, BM: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr):
    """Issue the product of a consumer's part of a tile's dq, (64, 64) or (64, 32).

    It is half the columns of 64 queries, or one of two parts of the channels, or all columns of 64
    of 128 queries.
    """
    k = ks[C if PARTS == 2 else 0].index(at)
    if BM == 128:
        ds = ds.slice(C * 64, 64, dim=1)
    elif PARTS == 1:
        k = k.slice(C * 64, 64, dim=1)
    return warpgroup_mma(
        ds.permute((1, 0)), k, zero_product(k.shape[1]), use_acc=False, is_async=True
    )


@gluon.jit
def own_keys(ks, at, C: gl.constexpr):
    """All parts of the k of a consumer's keys."""
    return [x.index(at).slice(C * KEYS, KEYS, dim=0) for x in ks]


@gluon.jit
def output_buffers(
    stages, vs, it, v_at, D: gl.constexpr, BM: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr
):
    """Return the buffers from which a consumer's dv and dk leave after `it` steps; its v is v_at.

    Of 64 channels they fit into the place of the next ds, and k and v can be loaded meanwhile.
    Otherwise they take the places of v and of parts of dq: 16 KiB for each consumer, of which the
    second part begins at 8.
    """
    if BM >= 2 * D:
        dv = (stages[0].index(4 * (it & 1) + C),)
        dk = (stages[0].index(4 * (it & 1) + C + 2),)
    elif PARTS == 1:
        dv = (vs[0].index(v_at),)
        dk = (stages[0].index(C),)
    else:
        dv = (vs[0].index(v_at), vs[1].index(v_at))
        dk = (stages[0].index(2 * C), stages[1].index(4 * C + 2))
    return dv, dk


@gluon.jit
def writer(
    dq, dk, dv,
    dq_part, stages, vs,
    output_empty, v_empty, queue,
    semaphores, counter, schedule,
    GROUP: gl.constexpr, D: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr, ZEROES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Add the parts of dq of consumer C to memory, and store its dk and dv."""
    _, _, _, Tq, Tk, Hq, _, _, _ = schedule
    V_SLOTS: gl.constexpr = v_empty.shape[0]
    it = 0
    count = 0
    t = pop(queue, count, 1)
    while t >= 0:
        b, kv_head, n0, down, lo, n, qfirst, qlast = key_tile(t, schedule, GROUP, BM, BN, ORDERED)
        from_query, to_query, before = predecessor(qfirst, qlast, n0, Tk, down, BN)
        if ZEROES:
            gl.static_assert(GROUP == 1)
            zero_ahead(counter, semaphores, b * Hq + kv_head, n0 // BN, schedule, BM, D, C)

        # dq, step by step
        for x in range(n * GROUP):
            m, head = query_tile(x, lo, n, down, GROUP, DIRECTIONS)
            at = 2 * ((b * Hq + kv_head * GROUP + head) * gl.cdiv(Tq, BM) + m) + C
            if ORDERED and ((m + 1) * BM > from_query) & (m * BM <= to_query):
                # It need not acquire: nothing is read that others wrote; sums are added in L2, and
                # this one is sent after it.
                while gl.load(semaphores + at, volatile=True) != before:
                    pass
            bar_sync(OUTPUT_FULL + C, 160)
            row = at * 16
            if PARTS == 2:  # the second part is half as wide
                row = (at - C) // 2 * 24 + C * 16
            tma_add(dq, [row, 0], dq_part)
            tma.store_wait(0)
            mbarrier.arrive(output_empty, count=1)
            if ORDERED:
                release_sent(semaphores + at, before)

        # dk and dv, once per walk
        it += n * GROUP
        bar_sync(OUTPUT_FULL + C, 160)
        slot = count % V_SLOTS
        dv_own, dk_own = output_buffers(stages, vs, it, 2 * slot + C, D, BM, PARTS, C)
        store_parts(dv, dv_own, b, n0 + C * KEYS, kv_head)
        store_parts(dk, dk_own, b, n0 + C * KEYS, kv_head)
        tma.store_wait(0)
        mbarrier.arrive(output_empty, count=1)
        if BM < 2 * D:
            mbarrier.arrive(v_empty.index(slot), count=1)
        count += 1
        t = pop(queue, count, 1)


@gluon.jit
def signal_writer(ready, C: gl.constexpr):
    """Tell the writer, if `ready`, that its consumer's output is in shared memory."""
    if ready:
        fence_async_shared()
        bar_arrive(OUTPUT_FULL + C, 160)


@gluon.jit
def step(
    s, dk, dv, v_own,
    buffers, dss, dq_part,
    m0, output_empty, loaded,
    it, count, zero, x, more,
    qfirst_j, qlast_j, last_first, first_last, scale_log2, cap, key_bias,
    PARTS: gl.constexpr, BM: gl.constexpr, ONE_IF: gl.constexpr, PINGPONG: gl.constexpr,
    HAS_BIAS: gl.constexpr, FIRST: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Take step x of a walk, one tile of queries: return the next tile's scores, and dk, dv.

    The scores `s` of this tile are there. Meanwhile dq of the tile before, if this is not the
    FIRST, is formed, and the writer is told of the one before that. A consumer reports its ds after
    using both ds of the tile before, so the next ds may take their place.

    `v_own`: v of the consumer's keys, if that is in registers. `ONE_IF`: one `if` around both
    halves of the mask. `it & zero` is 0, which the compiler does not know: else it would keep the
    descriptors of k and v in registers, and spill others.
    """
    qs, ks, vs, dos, lses, deltas = buffers
    dtype: gl.constexpr = qs[0].dtype
    zeros = zero_product(BM)
    s_layout: gl.constexpr = zeros.type.layout
    a_layout: gl.constexpr = dk[0].type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=a_layout, k_width=2)
    now, after = it & 1, (it + 1) & 1
    k_at = count % loaded.k_full.shape[0] + (it & zero)
    if PARTS == 1:
        v_own = at_index(vs, 2 * (count % loaded.v_full.shape[0]) + C + (it & zero))
    if HAS_BIAS:
        key_bias += C * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
        bias_j = gl.load(key_bias)[:, None]

    # mask, if some query of the tile does not see all keys
    HIDDEN: gl.constexpr = float("-inf") if cap is None else HIDDEN_TANH
    if cap is not None:
        s = softcapped(s, cap)
    if not ONE_IF or (m0 < last_first) | (m0 + BM - 1 > first_last):
        s = mask_scores(s, m0, qfirst_j, qlast_j, m0 < last_first, m0 + BM - 1 > first_last, HIDDEN)

    # dp = v·doᵀ in flight, p = exp(s - lse)
    mbarrier.wait(loaded.do_full.index(now), (it >> 1) & 1)
    dp_async = start_scores(v_own, dos, now, zeros)
    lse_i = lses.index(now).load(s_layout)
    if HAS_BIAS:
        lse_i -= (bias_j - lses.index(2 + now).load(s_layout)) * LOG2E
    p = gl.exp2(s * scale_log2 - lse_i)
    if cap is not None:
        # before the branch below, across which s would take registers
        p16 = gl.convert_layout(p.to(dtype), p_layout)
        p *= 1.0 - s * s
        if HAS_BIAS:  # for fewer registers
            p = p.to(dtype)
    if not FIRST:
        signal_writer(x > 1, C)

    # dv += p·do, ds = p (dp - delta), dk += ds·q
    if cap is None:
        p16 = gl.convert_layout(p.to(dtype), p_layout)
    dv_async = start_sum(p16, dos, now, dv)
    dp = warpgroup_mma_wait(PARTS, deps=(dp_async,))
    dp -= deltas.index(now).load(s_layout)
    ds = (p * dp if cap is None or not HAS_BIAS else unpacked_product(p, dp)).to(dtype)
    if HAS_BIAS:
        # capped, p has the slope of tanh
        gradient = p * dp if cap is None else unpacked_product(gl.convert_layout(p16, s_layout), dp)
        gl.atomic_add(key_bias + 2 * KEYS, gl.sum(gradient, axis=1), sem="relaxed")
    dk_async = start_sum(gl.convert_layout(ds, p_layout), qs, now, dk)

    # ds to shared memory, once the other consumer has used the ds before it
    if not FIRST:
        bar_sync(DS_FULL + 2 * (1 - C) + after, 256)
    dss.index(now).slice(C * KEYS, KEYS, dim=0).store(ds)

    # dq of the tile before, and the next tile's scores
    if PINGPONG:
        fence_async_shared()
        bar_sync(TURN + 9 * C, 256)
    if not FIRST:
        dq_async = start_dq(dss.index(after), ks, k_at, BM, PARTS, C)
    done = finished(dk_async + dv_async, 0 if FIRST else 1)
    dk, dv = done[:PARTS], done[PARTS:]
    bar_arrive(Q_DO_EMPTY + now, 288)
    mbarrier.wait(loaded.q_full.index(after), ((it + 1) >> 1) & 1, pred=more)
    s_async = start_scores(own_keys(ks, k_at, C), qs, after, zeros)
    if not FIRST:
        dq = warpgroup_mma_wait(PARTS, deps=(dq_async,))
    if not PINGPONG:  # faster here, once the next scores are in flight
        fence_async_shared()
    bar_arrive(DS_FULL + 2 * C + now, 256)
    if not FIRST:
        mbarrier.wait(output_empty, (it + count) & 1)
        dq_part.store(register_order(dq))
    s = warpgroup_mma_wait(0, deps=(s_async,))
    if PINGPONG:
        bar_arrive(TURN + 9 * (1 - C), 256)
    return s, dk, dv


@gluon.jit
def consumer(
    buffers, dss, dq_part, stages,
    loaded, output_empty, queue,
    schedule, key_bias, scale, scale_log2, cap, zero,
    GROUP: gl.constexpr, D: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C: dk and dv of its 64 keys of each tile, and its part of dq at every step."""
    qs, ks, vs = buffers.qs, buffers.ks, buffers.vs
    q_full, _, k_full, k_empty, v_full, v_empty = loaded
    dtype: gl.constexpr = qs[0].dtype
    zeros = zero_product(BM)
    s_layout: gl.constexpr = zeros.type.layout
    K_SLOTS: gl.constexpr = k_full.shape[0]
    V_SLOTS: gl.constexpr = v_full.shape[0]
    OUTPUT_IN_DS: gl.constexpr = BM >= 2 * D  # see output_buffers
    # slower at 64 channels, but takes fewer registers
    HAS_BIAS: gl.constexpr = key_bias is not None
    ONE_IF: gl.constexpr = D > 64 or HAS_BIAS or (ORDERED and GROUP > 1)
    PINGPONG: gl.constexpr = D > 64
    if PINGPONG and C == 1:
        bar_arrive(TURN, 256)
    it = 0
    count = 0
    t = pop(queue, count, 4)
    m0, n, down, qfirst_j, qlast_j, last_first, first_last = consumer_walk(
        gl.maximum(t, 0), schedule, GROUP, BM, BN, ORDERED, DIRECTIONS, C, KEYS, s_layout
    )
    while t >= 0:
        dk = zero_parts(qs)
        dv = zero_parts(qs)
        own_rows, stride = bias_of_keys(key_bias, t, schedule, GROUP, BM, BN, ORDERED)
        k_slot, v_slot = count % K_SLOTS, count % V_SLOTS
        steps = n * GROUP
        wait_keys(k_full, count)
        if steps > 0:
            # prologue: the scores of the first tile of queries
            mbarrier.wait(q_full.index(it & 1), (it >> 1) & 1)
            if not PINGPONG and C == 1:
                bar_sync(TURN + 9, 256)
            # `& zero`: as in `step`
            k_at = k_slot + ((it if ORDERED or GROUP > 1 else count) & zero)
            s_async = start_scores(own_keys(ks, k_at, C), qs, it & 1, zeros)
            wait_keys(v_full, count)
            v_own = at_index(vs, 2 * v_slot + C)
            if PARTS == 2:
                in_registers: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
                v_own = [x.load(in_registers) for x in v_own]
            if OUTPUT_IN_DS:
                mbarrier.wait(output_empty, (it + count + 1) & 1)
            s = warpgroup_mma_wait(0, deps=(s_async,))
            if not PINGPONG and C == 0:
                bar_arrive(TURN + 9, 256)

            # the first step, then the steady state
            s, dk, dv = step(
                s, dk, dv, v_own,
                buffers, dss, dq_part,
                m0, output_empty, loaded,
                it, count, zero, 0, steps > 1,
                qfirst_j, qlast_j, last_first, first_last, scale_log2, cap, own_rows,
                PARTS, BM, ONE_IF, PINGPONG, HAS_BIAS, True, C,
            )  # fmt: skip
            it += 1
            last_m0 = m0 + (n - 1) * BM
            for x in range(1, steps):
                if DIRECTIONS == BY_HEAD:
                    m0 = gl.where(m0 == last_m0, last_m0 - (n - 1) * BM, m0 + BM)
                elif x % GROUP == 0:
                    if DIRECTIONS == IN_TURN:
                        m0 += gl.where(down, -BM, BM)
                    else:
                        m0 += BM if DIRECTIONS != DOWN else -BM
                s, dk, dv = step(
                    s, dk, dv, v_own,
                    buffers, dss, dq_part,
                    m0, output_empty, loaded,
                    it, count, zero, x, x + 1 < steps,
                    qfirst_j, qlast_j, last_first, first_last, scale_log2, cap,
                    own_rows + query_tile(x, 0, n, down, GROUP, DIRECTIONS)[1] * stride,
                    PARTS, BM, ONE_IF, PINGPONG, HAS_BIAS, False, C,
                )  # fmt: skip
                it += 1
            signal_writer(steps > 1, C)
        else:
            wait_keys(v_full, count)
            if OUTPUT_IN_DS:
                mbarrier.wait(output_empty, (it + count + 1) & 1)
        if OUTPUT_IN_DS:
            mbarrier.arrive(v_empty.index(v_slot), count=1)

        # the next walk, which takes a while to look up
        t = pop(queue, count + 1, 4)
        m0, n, down, qfirst_j, qlast_j, last_first, first_last = consumer_walk(
            gl.maximum(t, 0), schedule, GROUP, BM, BN, ORDERED, DIRECTIONS, C, KEYS, s_layout
        )

        # dq of the last tile
        if steps > 0:
            bar_sync(DS_FULL + 2 * (1 - C) + ((it - 1) & 1), 256)
            k_at = k_slot + ((count if ORDERED or GROUP > 1 else it) & zero)
            dq_async = start_dq(dss.index((it + 1) & 1), ks, k_at, BM, PARTS, C)
            dq = warpgroup_mma_wait(0, deps=(dq_async,))
            mbarrier.arrive(k_empty.index(k_slot), count=1)
            mbarrier.wait(output_empty, (it + count) & 1)
            dq_part.store(register_order(dq))
            signal_writer(True, C)
        else:
            mbarrier.arrive(k_empty.index(k_slot), count=1)

        # epilogue: dk and dv
        dv_own, dk_own = output_buffers(stages, vs, it, 2 * v_slot + C, D, BM, PARTS, C)
        outputs = [(dv[i].to(dtype), (dk[i] * scale).to(dtype)) for i in (0, 1)[:PARTS]]
        if not OUTPUT_IN_DS:
            mbarrier.wait(output_empty, (it + count + 1) & 1)
        for i in gl.static_range(PARTS):
            dv_own[i].store(outputs[i][0])
            dk_own[i].store(outputs[i][1])
        if OUTPUT_IN_DS:
            mbarrier.wait(output_empty, (it + count + 1) & 1)
        signal_writer(True, C)
        count += 1


@gluon.jit(do_not_specialize=["Tq", "Tk", "Hq", "tiles", "heads", "l2_heads", "zero"])
def backward_kernel(
    lse2, delta, references,
    q, k, v, do, dk, dv, dq,
    q1, k1, v1, do1, dk1, dv1, dq1,
    semaphores, counter, qfirst, qlast, key_bias, stride_ib, scale, scale_log2, cap,
    Tq, Tk, Hq, tiles, heads, l2_heads, zero,
    q_shared: gl.constexpr, k_shared: gl.constexpr, v_shared: gl.constexpr,
    ds_shared: gl.constexpr, row_shared: gl.constexpr,
    q1_shared: gl.constexpr, k1_shared: gl.constexpr, v1_shared: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr, ZEROES: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dk, dv (B, Tk, Hkv, D) and, added to the zeros in dq, dq without the scale.

    The first seventeen are tensor maps; names with 1, for the last D1 channels, are None if D1 is
    0. So are references and key_bias, see `of_bias`, without a key bias.
    dq: fp32, for each head and tile of queries 32 rows of 256, 16 from each consumer (see
    `register_order`); if D1 is 32, 8 of 24 from the second. `counter`: 0. `semaphores`, ordered: an
    int32, 0, for each consumer's part of a tile of dq; if `ZEROES`, for each head.
    """
    # shared memory
    dtype: gl.constexpr = q.dtype
    D0: gl.constexpr = D - D1
    PARTS: gl.constexpr = 1 if D1 == 0 else 2
    qs = part_buffers(dtype, 2, BM, D0, q_shared, D1, q1_shared)
    dos = part_buffers(dtype, 2, BM, D0, q_shared, D1, q1_shared)
    ks = part_buffers(dtype, K_SLOTS, BN, D0, k_shared, D1, k1_shared)
    # at 64 channels references take the memory of a second v
    OF_V: gl.constexpr = V_SLOTS if references is None or D > 64 else 1
    vs = part_buffers(dtype, 2 * OF_V, KEYS, D0, v_shared, D1, v1_shared)
    lses = gl.allocate_shared_memory(gl.float32, [2 if key_bias is None else 4, 1, BM], row_shared)
    deltas = gl.allocate_shared_memory(gl.float32, [2, 1, BM], row_shared)
    dss = gl.allocate_shared_memory(dtype, [2, BN, BM], ds_shared)
    dq_parts = gl.allocate_shared_memory(gl.float32, [2, 16, 256], row_shared)
    dq_part = (dq_parts.index(0), dq_parts.index(1))
    # see output_buffers
    stages = (
        reinterpret(
            dss if BM >= 2 * D else dq_parts,
            dtype,
            [8 if BM >= 2 * D else 2 * PARTS, KEYS, D0],
            v_shared,
        ),
    )
    dq_maps = (dq, dq)
    if D1 > 0:
        gl.static_assert((D0 == 64) & (D1 == 32), "the places of dk and of parts of dq")
        stages = (stages[0], reinterpret(dq_parts, dtype, [8, KEYS, D1], v1_shared))
        dq_part1 = reinterpret(dq_parts, gl.float32, [4, 8, 256], row_shared).index(2)
        dq_part, dq_maps = (dq_part[0], dq_part1), (dq, dq1)
    # consumers and writers pop the queue
    buffers = Buffers(qs, ks, vs, dos, lses, deltas)
    loaded, queue = barriers(4, K_SLOTS, OF_V)
    output_empty = mbarriers(2, 1)
    schedule = TileSchedule(qfirst, qlast, stride_ib, Tq, Tk, Hq, tiles, heads, l2_heads)

    # warps: two consumers, the producer, two writers
    # fmt: off
    gl.warp_specialize([
        (consumer, (
            buffers, dss, dq_part[c], stages,
            loaded, output_empty.index(c), queue,
            schedule, key_bias, scale, scale_log2, cap, zero,
            GROUP, D, PARTS, BM, BN, ORDERED, DIRECTIONS, c,
        )) if c < 2 else (producer, (
            (q, q1)[:PARTS], (k, k1)[:PARTS], (v, v1)[:PARTS], (do, do1)[:PARTS], lse2, delta,
            references, buffers, loaded, queue,
            counter, schedule,
            GROUP, D, BM, BN, ORDERED, DIRECTIONS, ZEROES,
        )) if c == 2 else (writer, (
            dq_maps[c - 3], (dk, dk1)[:PARTS], (dv, dv1)[:PARTS],
            dq_part[c - 3], stages, vs,
            output_empty.index(c - 3), loaded.v_empty, queue,
            semaphores, counter, schedule,
            GROUP, D, PARTS, BM, BN, ORDERED, DIRECTIONS, ZEROES, c - 3,
        ))
        for c in (0, 1, 2, 3, 4)
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])
    # fmt: on


@triton.jit
def unpack_part(
    sums, out, scale, T, H, row, bh, D: tl.constexpr, PAD: tl.constexpr, START: tl.constexpr
):
    """Up to 64 channels, from START on, of 64 queries from `row` on: what one consumer adds."""
    WIDTH: tl.constexpr = 64 if PAD - START >= 64 else PAD - START
    x = (tl.load(sums + tl.arange(0, 64 * WIDTH)) * scale).to(out.dtype.element_ty)
    x = x.reshape([WIDTH // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, WIDTH])
    i, c = row + tl.arange(0, 64)[:, None], START + tl.arange(0, WIDTH)[None, :]
    inside = (i < T) & (c < D)
    tl.store(out + (((bh // H).to(tl.int64) * T + i) * H + bh % H) * D + c, x, mask=inside)


@triton.jit(do_not_specialize=["T", "H", "n"])
def unpack_kernel(
    sums, out, parts, dsinks, scale, T, H, n,
    D: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """out (B, T, H, D) = scale · sums (B, H, tiles, BM · PAD), which is in `register_order`; dsinks
    (H,) are the sums of parts (H, n).
    """
    tile, tiles = tl.program_id(0), tl.cdiv(T, BM)
    if (tile < H) & (n > 0):
        total = tl.zeros([1024], tl.float32)
        for start in range(0, n, 1024):
            at = start + tl.arange(0, 1024)
            total += tl.load(parts + tile.to(tl.int64) * n + at, mask=at < n, other=0.0)
        tl.store(dsinks + tile, tl.sum(total, 0))
    m, bh = tile % tiles, tile // tiles
    sums += tile.to(tl.int64) * BM * PAD
    # consumers share the channels of 64 queries, or 128 queries of 64 channels
    for part in tl.static_range(0, BM * PAD // 64, 64):
        row = m * BM + part // PAD * 64
        unpack_part(sums + part * 64, out, scale, T, H, row, bh, D, PAD, part % PAD)


def layouts_of(config: BackwardConfig | None, size: int, dtype: gl.dtype) -> dict[str, Any]:
    """The constants of `backward_kernel`, or without a config of a larger one, that lay out tiles
    of heads of `size` channels.
    """
    if config is None:
        large = LARGE[size]
        return dict(
            shared=shared_layout((large.BM, large.width), dtype),
            ds_shared=shared_layout((large.BM, large.box), dtype),
        )
    width, rest = split(size)
    layouts = {
        f"{x}{part}_shared": shared_layout((n, channels), dtype) if channels else None
        for x, n in (("q", config.BM), ("k", config.BN), ("v", 64))
        for part, channels in (("", width), ("1", rest))
    }
    return dict(
        **layouts,
        ds_shared=shared_layout((config.BN, config.BM), dtype),
        D1=rest,
        **{name.upper(): value for name, value in config._asdict().items()},
    )


class BackwardLaunches(NamedTuple):
    """Kernels of a known shape and the 32-bit values of their buffer.

    The buffer has the counter, padded to 16 bytes, the semaphores, then from `sums` on the sums of
    dq, from `rows_from` on lse2 and delta, of `rows` each, and the parts of dsinks.
    """

    parts: int  # of the channels; each has tensor maps
    sums: int
    rows_from: int
    rows: int
    sink_parts: int
    preprocess: Relaunch
    main: Relaunch
    unpack: Relaunch


_launches: dict[Hashable, BackwardLaunches] = {}


def backward(
    do: Tensor,
    dlse: Tensor | None,
    saved: Saved,
    intervals: Intervals,
    scores: Scores,
    ordered: bool = False,
) -> Gradients:
    """Return `Gradients`, contiguous; `ordered`: all have the same bits every time."""
    scale, softcap, sinks, key_bias = scores
    q, k, v, out, lse = saved
    device = q.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return backward(do, dlse, saved, intervals, scores, ordered)
    if dlse is not None:
        dlse = dlse.contiguous()
    pointers = out, do, lse, lse if dlse is None else dlse, lse if sinks is None else sinks
    q_at, k_at, v_at, *ends = [x.data_ptr() for x in (q, k, v, *intervals[:4])]
    out_at, do_at, *others_at = given = [x.data_ptr() for x in pointers]
    # larger heads have a kernel without a choice of tiles
    config = CONFIGS.get(size := hopper_size(q.shape[3]))
    tile = config or LARGE[size]
    # everything that the choice of a compiled kernel depends on
    key = (
        *(q.shape, k.shape, v.shape),
        *(q.stride(), k.stride(), v.stride(), do.stride(), out.stride()),
        *(q.dtype, k.dtype, v.dtype, do.dtype, device, scale, softcap, ordered),
        *(dlse is None, sinks is None, key_bias is None),
        *(intervals.first.stride(), intervals.qfirst.shape, intervals.qfirst.stride()),
        *[at % 16 for at in ends],
        *(out_at % 16, *[at % 16 for at in others_at], intervals.span, config),
    )
    launches = _launches.get(key)
    aligned = (q_at | k_at | v_at | do_at) % 16 == 0
    if launches is None or not aligned:
        return _first_backward(do, dlse, saved, intervals, scores, ordered, tile, key)
    dq, dk, dv = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    dsinks = None if sinks is None else torch.empty_like(sinks)
    parts, sums, rows_from, rows, sink_parts, preprocess, main, unpack = launches
    count = rows_from + 2 * rows + sink_parts
    buffer = torch.empty(count, dtype=torch.float32, device=q.device)
    stream, at = stream_of(device), buffer.data_ptr()
    sums_at, lse2_at, dq_at = at + 4 * sums, at + 4 * rows_from, dq.data_ptr()
    delta_at, parts_at = lse2_at + 4 * rows, lse2_at + 8 * rows
    biases = of_bias(scores, intervals, lse, tile.BN, BIAS_ROWS.value)
    references_at, *bias_at = [x.data_ptr() for x in biases] or given[2:3]
    # delta, then dk, dv and the sums, then dq
    preprocess(stream, (), *given, references_at, lse2_at, delta_at, parts_at, at)
    row_maps = (lse2_at, delta_at, references_at)[: 2 + len(bias_at)]
    mapped, plain = [q_at, k_at, v_at, do_at, dk.data_ptr(), dv.data_ptr()], [at + 16, at]
    if tile.maps_sums:
        mapped = [*mapped, sums_at] * parts
    else:
        plain = [sums_at, *plain]
    main(stream, (*row_maps, *mapped), *plain, *ends[-tile.intervals :], *bias_at)
    unpack(stream, (), sums_at, dq_at, parts_at, dq_at if dsinks is None else dsinks.data_ptr())
    return Gradients(dq, dk, dv, dsinks, _of_keys(biases, k))


def _first_backward(
    do: Tensor,
    dlse: Tensor | None,
    saved: Saved,
    intervals: Intervals,
    scores: Scores,
    ordered: bool,
    tile: BackwardConfig | Large,
    key: Hashable,
) -> Gradients:
    """Compute a shape for the first time, or copy inputs that tensor maps cannot address."""
    q, k, v, out, lse = saved
    addressed = [addressable(x) for x in (q, k, v, do)]
    if any(x is not y for x, y in zip(addressed, (q, k, v, do), strict=True)):
        q, k, v, do = addressed
        return backward(do, dlse, Saved(q, k, v, out, lse), intervals, scores, ordered)
    sinks = scores.sinks
    B, Tq, Hq, D = q.shape
    size, BM = hopper_size(D), tile.BM
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    # one buffer, as `BackwardLaunches` says
    heads, group = B * k.shape[2], Hq // k.shape[2]
    dq_tiles = B * Hq * triton.cdiv(Tq, BM)
    count = dq_tiles * BM * size
    # short walks wait for HBM: their q, do and fp32 sums of dq stay in L2, those of longer need not
    is_short = k.shape[1] < LONG
    zeroes = is_short and group == 1 and size in CONFIGS and not ordered
    l2_heads = heads_in_l2(q, heads, 1, 16 if zeroes else 4 * group if is_short else 2)
    # and but for the first group of heads, sums are zeroed shortly before they are added to
    zeroes = zeroes and l2_heads < heads
    zeroed = count // heads * l2_heads if zeroes else count
    semaphores = 2 * dq_tiles if ordered else heads
    first_sum = triton.cdiv(4 + semaphores, 64) * 64
    # each program of the first kernel writes as many zeros, a multiple of 16
    programs = math.prod(sink_parts(lse))
    zeroed = triton.cdiv(first_sum + zeroed, 16 * programs) * 16 * programs
    rows, parts = padded_rows(lse), 0 if sinks is None else programs
    rows_from = max(zeroed, first_sum + count)
    after = rows_from + 2 * rows.numel()
    buffer = torch.empty(after + parts, dtype=torch.float32, device=q.device)
    ints, sums = buffer[:first_sum].view(torch.int32), buffer[first_sum : first_sum + count]
    lse2, delta = buffer[rows_from:after].view(2, *rows).unbind()
    # delta, then dk, dv and the sums, then dq
    biases = of_bias(scores, intervals, lse, tile.BN, BIAS_ROWS.value)
    into, references = (lse2, delta, buffer[after:], buffer[:zeroed]), biases[0] if biases else None
    before = preprocess_into(into, do, dlse, saved, sinks, references)
    operands, of_rows = (q, k, v, do, dk, dv), (lse2, delta, *biases[:1])
    of_call = biases[1:], intervals, scores, l2_heads, ordered, zeroes
    main = _first_launch(operands, of_rows, sums, ints, *of_call)
    constants = dict(D=D, PAD=size, BM=BM)
    dsinks = None if sinks is None else torch.empty_like(sinks)
    pointers = sums, dq, buffer[after:], dq if dsinks is None else dsinks
    given = pointers, (scores.scale, Tq, Hq, parts // Hq), constants
    unpack = first_launch(unpack_kernel, dq_tiles, (), *given, num_warps=8)
    assert before is not None and unpack is not None, "Gluon has no interpreter"
    sizes = 2 if size == 96 else 1, first_sum, rows_from, rows.numel(), parts
    if len(_launches) >= LAUNCHES:
        _launches.clear()
    _launches[key] = BackwardLaunches(*sizes, before, main, unpack)
    return Gradients(dq, dk, dv, dsinks, _of_keys(biases, k))


def _of_keys(biases: list[Tensor], k: Tensor) -> Tensor | None:
    """Return the gradient of the key bias, if there is one, from rows of `of_bias`."""
    of_keys = [x[..., 1:, :].sum(3).flatten(2)[..., : k.shape[1]] for x in biases[1:]]
    return of_keys[0].contiguous() if of_keys else None


def _first_launch(
    operands: Sequence[Tensor],
    rows: Sequence[Tensor],
    sums: Tensor,
    ints: Tensor,
    to_bias: Sequence[Tensor],
    intervals: Intervals,
    scores: Scores,
    l2_heads: int,
    ordered: bool,
    zeroes: bool,
) -> Relaunch:
    """Launch the kernel that is one pass over the keys; returns how to launch it again.

    It has tensor maps of the operands q, k, v, do, dk, dv, of lse2 and delta, with a key bias the
    reference, and of the sums of dq. `ints`: its counter, padded to 16 bytes, and semaphores.
    """
    (B, Tq, Hq, D), (Tk, Hkv) = operands[0].shape, operands[1].shape[1:3]
    size = hopper_size(D)
    config, group = CONFIGS.get(size), Hq // Hkv
    dtype = gl.bfloat16 if operands[0].dtype == torch.bfloat16 else gl.float16
    tile = config or LARGE[size]
    tiles = triton.cdiv(Tk, tile.BN)
    pointers = ints[4:], ints, *intervals[4 - tile.intervals : 4]
    # tensor maps: of rows, then of the operands of each part of the channels, and of sums
    maps = [map_of_rows(of, B * Hq, tile.BM) for of in rows] + [None] * (3 - len(rows))
    scalars: tuple[int | float, ...] = (
        *(batch_stride(intervals.qfirst), scores.scale, *exponents(scores)),
        *(Tq, Tk, Hq, tiles, B * Hkv, l2_heads, 0),
    )
    programs = min(tiles * B * Hkv, multiprocessors(operands[0].device))
    if config is None:
        large = LARGE[size]
        boxes = zip(operands, (large.BM, large.box, large.box) * 2, strict=True)
        maps += [descriptor(tensor, n, large.width, dtype) for tensor, n in boxes]
        kernel = large.kernel
        if large.maps_sums:
            maps += [map_of_rows(sums, len(sums) // 256, 256, 16)]
        else:
            pointers = (sums, *pointers)
        if large.intervals == 4:
            scalars = batch_stride(intervals.first), *scalars
    else:
        kernel = backward_kernel
        # v in one box for each consumer
        boxes = tuple(zip(operands, (config.BM, config.BN, 64, config.BM, 64, 64), strict=True))
        for width, part in zip(split(size), (16, 8), strict=True):
            if width:
                maps += [descriptor(tensor, n, width, dtype) for tensor, n in boxes]
                maps += [map_of_rows(sums, len(sums) // 256, 256, part)]
            else:
                maps += [None] * (len(boxes) + 1)
    # no pointer is None
    pointers, scalars = (*pointers, *to_bias), scalars if to_bias else (None, *scalars)
    constants = layouts_of(config, size, dtype) | dict(
        row_shared=ROW_LAYOUT,
        GROUP=group,
        D=size,
        ORDERED=ordered,
        DIRECTIONS=directions(size, group, ordered, intervals.span),
    )
    if config is not None:
        constants["ZEROES"] = zeroes
    again = first_launch(kernel, programs, maps, pointers, scalars, constants, num_warps=4)
    assert again is not None, "Gluon has no interpreter"
    return again
