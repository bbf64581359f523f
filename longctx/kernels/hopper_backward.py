"""FlashAttention backward for Hopper in Gluon: one pass over the keys, five matrix products, dq
added up by TMA.

Equations, letters and masks are those of portable.py. A program owns BN keys of one key-value head,
its two consumers 64 each; it walks over the queries that see them, for all query heads of the
group, so that dk and dv need no atomics. Scores are computed transposed, which makes p and ds
register operands of dv and dk. ds also goes through shared memory, where both consumers meet: each
forms half of the tile's dq, half of its columns or of its queries, one tile later, so that no
consumer waits for the other's ds. A warp for each consumer, the writer, hears of that part once
more a tile later, when nobody has to wait for its way to shared memory, and adds it, in fp32, to
sums in global memory by TMA; the sums lie in the order in which products leave them in registers,
and are put in place and scaled at the end. The writer also stores dk and dv. One more warp, the
producer, loads. The next tile's scores are in flight meanwhile; the consumers take turns, so that
one has products while the other has its exponentials.

The sum over key tiles arrives in any order, so dq may differ in its last bits from run to run.
Ordered, it does not: hopper_order.py.

More than 196 KiB of shared memory, which leaves 28 KiB of L1 cache, made the same code 4 to 7%
slower; no config takes it.
"""

from __future__ import annotations

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
from longctx.kernels.hopper_common import (
    addressable,
    bar_arrive,
    bar_sync,
    descriptor,
    hide,
    processors,
    receive,
    send,
)
from longctx.kernels.hopper_order import (
    owned_keys,
    pass_turn,
    queries,
    query_tile,
    turn_before,
    walk_of,
)
from longctx.kernels.portable import LOG2E, rows_of_backward
from longctx.kernels.walk import batch_stride, heads_together


class Config(NamedTuple):
    """BM queries and BN keys of a tile, registers of a consumer.

    `fence_last`: a consumer makes its ds known to matrix products when the next scores are in
    flight, not before.
    """

    BM: int
    BN: int
    registers: int
    fence_last: bool


CONFIGS = {64: Config(128, 128, 240, True), 128: Config(64, 128, 240, False)}  # by head size
ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
KEYS = gl.constexpr(64)  # of a consumer warpgroup
# Of the hardware's 16 named barriers, of which Triton takes 0 to 5 for five partitions. They cost
# less than an mbarrier's arrival, for which the consumer's warps wait for one another.
TURN = gl.constexpr(6)  # it is a consumer's turn to form products: 6 + 9 · consumer
DS = gl.constexpr(9)  # ds is there: 9 + 2 · consumer + tile & 1
FREE = gl.constexpr(13)  # q and do of a tile have been read: 13 + tile & 1
FULL = gl.constexpr(7)  # a consumer's part of dq, or its dk and dv, are there: 7 + consumer


@gluon.jit
def load_keys(x, xs, full, empty, done, b, n0, h):
    """A tile of k or v, in one piece or one for each consumer, as soon as the one before it has
    been used.
    """
    PIECES: gl.constexpr = xs.shape[0]
    N: gl.constexpr = xs.shape[1]
    D: gl.constexpr = xs.shape[2]
    mbarrier.wait(empty, (done & 1) ^ 1)
    mbarrier.expect(full, PIECES * N * D * 2)
    for i in gl.static_range(PIECES):
        tma_load(x, [b, n0 + i * N, h, 0], full, xs.index(i).reshape([1, N, 1, D]))


@gluon.jit
def producer(
    q, k, v, do, lse2, delta, qs, ks, vs, dos, lses, deltas, qf, dof, kf, ke, vf, ve, mail, mf, me, counter,
    qfirst, qlast, stride_ib, Tq, Tk, Hq, tiles, heads, together,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ORDERED: gl.constexpr, WAYS: gl.constexpr,
):  # fmt: skip
    """Hands out tiles of keys to this program's other warps, and loads them and the queries of
    their walks, those a walk ahead.
    """
    Hkv = Hq // GROUP
    it = 0
    done = 0
    t = gl.program_id(0)
    if ORDERED:  # a program that does not run yet owns no tile
        t = gl.atomic_add(counter, 1)
    while t < tiles * heads:
        send(mail, mf, me, done, t)
        b, hk, n0, down = owned_keys(
            t, tiles, qlast, stride_ib, Tk, Hkv, heads, together, BN, ORDERED
        )
        lo, n = queries(qfirst + b * stride_ib, qlast + b * stride_ib, n0, Tk, BM, BN)
        for x in range(n * GROUP):
            h = hk * GROUP + x % GROUP
            m0 = query_tile(x, lo, n, down, GROUP, WAYS) * BM
            s = it & 1
            if it >= 2:
                bar_sync(FREE + s, 288)
            mbarrier.expect(qf.index(s), BM * D * 2 + BM * 4)
            tma_load(q, [b, m0, h, 0], qf.index(s), qs.index(s).reshape([1, BM, 1, D]))
            tma_load(lse2, [b * Hq + h, m0], qf.index(s), lses.index(s))
            if x == 0:
                load_keys(k, ks, kf, ke, done, b, n0, hk)
            mbarrier.expect(dof.index(s), BM * D * 2 + BM * 4)
            tma_load(do, [b, m0, h, 0], dof.index(s), dos.index(s).reshape([1, BM, 1, D]))
            tma_load(delta, [b * Hq + h, m0], dof.index(s), deltas.index(s))
            if x == 0:
                load_keys(v, vs, vf, ve, done, b, n0, hk)
            it += 1
        if n == 0:
            load_keys(k, ks, kf, ke, done, b, n0, hk)
            load_keys(v, vs, vf, ve, done, b, n0, hk)
        t = gl.atomic_add(counter, 1)
        if not ORDERED:
            t += gl.num_programs(0)
        done += 1
    send(mail, mf, me, done, -1)
    for x in range(gl.maximum(it - 2, 0), it):
        bar_sync(FREE + (x & 1), 288)


@gluon.jit
def product_dq(ds, k, BM: gl.constexpr, C: gl.constexpr):
    """A consumer's part of a tile's dq, (64, 64), in flight: its columns of 64 queries, or all
    columns of its 64 of 128 queries.
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
def in_registers(x):
    """x (64, 64), a matrix product, as (16, 256): 16 bytes of each thread, 512 of each warp in a
    row, so that no bank is asked twice.
    """
    x = x.reshape(
        [4, 2, 8, 8, 4, 2]
    )  # warp, half of its rows, row; columns: group, thread, one of two
    return x.permute((3, 0, 2, 4, 1, 5)).reshape([16, 256])


@gluon.jit
def results(stages, vs, it, D: gl.constexpr, BM: gl.constexpr, C: gl.constexpr):
    """Where a consumer's dv and dk leave from after `it` steps.

    Of 64 channels they fit into the place of the next ds, and k and v can be loaded meanwhile; else
    it is that of v, and of parts of dq.
    """
    dv = stages.index(4 * (it & 1) + C) if BM >= 2 * D else vs.index(C)
    dk = stages.index(4 * (it & 1) + C + 2) if BM >= 2 * D else stages.index(C)
    return dv, dk


@gluon.jit
def writer(
    dq, dk, dv, part, stages, vs, read, ve, mail, mf, me, turns, qfirst, qlast, stride_ib, Tq, Tk, Hq, tiles, heads, together,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ORDERED: gl.constexpr, WAYS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Adds a consumer's parts of dq to memory and stores its dk and dv; `read` tells the consumer
    that it may overwrite them.
    """
    it = 0
    done = 0
    t = receive(mail, mf, me, done, 1)
    while t >= 0:
        b, hk, n0, down = owned_keys(
            t, tiles, qlast, stride_ib, Tk, Hq // GROUP, heads, together, BN, ORDERED
        )
        lo, n = queries(qfirst + b * stride_ib, qlast + b * stride_ib, n0, Tk, BM, BN)
        from_query, to_query, turn = turn_before(
            qfirst + b * stride_ib, qlast + b * stride_ib, n0, Tk, down, BN
        )
        for x in range(n * GROUP):
            m = query_tile(x, lo, n, down, GROUP, WAYS)
            at = 2 * ((b * Hq + hk * GROUP + x % GROUP) * gl.cdiv(Tq, BM) + m) + C
            if ORDERED and ((m + 1) * BM > from_query) & (m * BM <= to_query):
                # It need not acquire: nothing is read that others wrote; sums are added in L2, and
                # this one is sent after it.
                while gl.load(turns + at, volatile=True) != turn:
                    pass
            bar_sync(FULL + C, 160)
            tma_add(dq, [at * 16, 0], part)
            tma.store_wait(0)
            mbarrier.arrive(read, count=1)
            if ORDERED:
                pass_turn(turns + at, n0, BN)
        it += n * GROUP
        bar_sync(FULL + C, 160)
        dv_mine, dk_mine = results(stages, vs, it, D, BM, C)
        at = [b, n0 + C * KEYS, hk, 0]
        tma_store(dv, at, dv_mine.reshape([1, KEYS, 1, D]))
        tma_store(dk, at, dk_mine.reshape([1, KEYS, 1, D]))
        tma.store_wait(0)
        mbarrier.arrive(read, count=1)
        if BM < 2 * D:
            mbarrier.arrive(ve, count=1)
        done += 1
        t = receive(mail, mf, me, done, 1)


@gluon.jit
def signal(there, C: gl.constexpr):
    """Tell the writer, if so, that what it is to write is there."""
    if there:
        fence_async_shared()
        bar_arrive(FULL + C, 160)


@gluon.jit
def step(
    s, dk, dv, ks, vs, qs, dos, lses, deltas, dss, part, m0, read, qf, dof, it, done, zero, x, more, qfirst_j, qlast_j, last_first,
    first_last, scale_log2, D: gl.constexpr, BM: gl.constexpr, FENCE_LAST: gl.constexpr, SKIP: gl.constexpr, TURNS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Step x of a walk, one tile of queries, whose scores `s` are there: adds to dk, dv, and
    returns the next tile's scores.

    Meanwhile dq of the tile before is formed, and the writer hears of the one before that. A
    consumer says that its ds is there once it has used both ds of the tile before, so that the next
    ds may take their place.

    `SKIP`: one `if` around both halves of the mask. `it & zero` is 0, which the compiler does not
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
    if not SKIP or (m0 < last_first) | (m0 + BM - 1 > first_last):
        s = hide(s, m0, qfirst_j, qlast_j, m0 < last_first, m0 + BM - 1 > first_last)
    mbarrier.wait(dof.index(now), (it >> 1) & 1)
    dpa = warpgroup_mma(
        vs.index(C + (it & zero)),
        dos.index(now).permute((1, 0)),
        zeros,
        use_acc=False,
        is_async=True,
    )
    p = gl.exp2(s * scale_log2 - lses.index(now).load(s_layout))
    if not TURNS and C == 0:  # noqa: SIM102, the first is known when compiling
        if x == 0:
            bar_arrive(TURN + 9, 256)
    signal(x > 1, C)
    dva = warpgroup_mma(gl.convert_layout(p.to(dtype), p_layout), dos.index(now), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dpa,))
    d = (p * (dp - deltas.index(now).load(s_layout))).to(dtype)
    dka = warpgroup_mma(gl.convert_layout(d, p_layout), qs.index(now), dk, is_async=True)
    if x > 0:
        bar_sync(DS + 2 * (1 - C) + after, 256)
    dss.index(now).slice(C * KEYS, KEYS, dim=0).store(d)
    if not FENCE_LAST:
        fence_async_shared()
    if TURNS:
        bar_sync(TURN + 9 * C, 256)
    dqa = product_dq(dss.index(after), ks.index(it & zero), BM, C)
    dk, dv = warpgroup_mma_wait(1, deps=(dka, dva))
    bar_arrive(FREE + now, 288)
    mbarrier.wait(qf.index(after), ((it + 1) >> 1) & 1, pred=more)
    k = ks.index(it & zero).slice(C * KEYS, KEYS, dim=0)
    sa = warpgroup_mma(k, qs.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dqa,))
    if FENCE_LAST:
        fence_async_shared()
    bar_arrive(DS + 2 * C + now, 256)
    if x > 0:
        mbarrier.wait(read, (it + done) & 1)
        part.store(in_registers(dq))
    s = warpgroup_mma_wait(0, deps=(sa,))
    if TURNS:
        bar_arrive(TURN + 9 * (1 - C), 256)
    return s, dk, dv


@gluon.jit
def consumer(
    qs, ks, vs, dos, lses, deltas, dss, part, stages, qf, dof, kf, ke, vf, ve, read, mail, mf, me, qfirst, qlast, stride_ib, scale,
    scale_log2, Tk, Hq, tiles, heads, together, zero, GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    FENCE_LAST: gl.constexpr, ORDERED: gl.constexpr, WAYS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = qs.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    a_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    zeros = gl.zeros([KEYS, BM], gl.float32, layout=s_layout)
    IN_DS: gl.constexpr = BM >= 2 * D
    SKIP: gl.constexpr = D == 128 or (
        ORDERED and GROUP > 1
    )  # at 64 channels slower, but takes fewer registers
    TURNS: gl.constexpr = (
        D == 128
    )  # at every step; else at the first of a walk, which keeps consumers that far apart
    if TURNS and C == 1:
        bar_arrive(TURN, 256)
    it = 0
    done = 0
    t = receive(mail, mf, me, done, 4)
    m0, n, down, qfirst_j, qlast_j, last_first, first_last = walk_of(
        gl.maximum(t, 0), qfirst, qlast, stride_ib, tiles, Tk, Hq // GROUP, heads, together, BM, BN, ORDERED, WAYS, C, KEYS, s_layout,
    )  # fmt: skip
    while t >= 0:
        dk = gl.zeros([KEYS, D], gl.float32, layout=a_layout)
        dv = gl.zeros([KEYS, D], gl.float32, layout=a_layout)
        mbarrier.wait(kf, done & 1)
        if n > 0:
            mbarrier.wait(qf.index(it & 1), (it >> 1) & 1)
            if not TURNS and C == 1:
                bar_sync(TURN + 9, 256)
            k_mine = ks.index((it if ORDERED or GROUP > 1 else done) & zero).slice(
                C * KEYS, KEYS, dim=0
            )
            sa = warpgroup_mma(
                k_mine, qs.index(it & 1).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            mbarrier.wait(vf, done & 1)
            if IN_DS:
                mbarrier.wait(read, (it + done + 1) & 1)
            s = warpgroup_mma_wait(0, deps=(sa,))
            for x in range(n * GROUP):
                s, dk, dv = step(
                    s, dk, dv, ks, vs, qs, dos, lses, deltas, dss, part, m0, read, qf, dof, it, done, zero, x, x + 1 < n * GROUP,
                    qfirst_j, qlast_j, last_first, first_last, scale_log2, D, BM, FENCE_LAST, SKIP, TURNS, C,
                )  # fmt: skip
                it += 1
                if (x + 1) % GROUP == 0:
                    m0 += gl.where(down, -BM, BM) if WAYS == 2 else BM
            signal(n * GROUP > 1, C)
            bar_sync(DS + 2 * (1 - C) + ((it - 1) & 1), 256)
            dqa = product_dq(
                dss.index((it + 1) & 1),
                ks.index((done if ORDERED or GROUP > 1 else it) & zero),
                BM,
                C,
            )
            dq = warpgroup_mma_wait(0, deps=(dqa,))
            mbarrier.wait(read, (it + done) & 1)
            part.store(in_registers(dq))
            signal(True, C)
        else:
            mbarrier.wait(vf, done & 1)
        mbarrier.arrive(ke, count=1)
        if IN_DS:
            mbarrier.arrive(ve, count=1)
        dv_mine, dk_mine = results(stages, vs, it, D, BM, C)
        dv_out, dk_out = dv.to(dtype), (dk * scale).to(dtype)
        mbarrier.wait(read, (it + done + 1) & 1)
        dv_mine.store(dv_out)
        dk_mine.store(dk_out)
        signal(True, C)
        # what the next walk needs is on its way while this one's results leave
        done += 1
        t = receive(mail, mf, me, done, 4)
        m0, n, down, qfirst_j, qlast_j, last_first, first_last = walk_of(
            gl.maximum(t, 0), qfirst, qlast, stride_ib, tiles, Tk, Hq // GROUP, heads, together, BM, BN, ORDERED, WAYS, C, KEYS, s_layout,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["Tq", "Tk", "Hq", "tiles", "heads", "together", "zero"])
def backward_kernel(
    q, k, v, do, lse2, delta, dq, dk, dv, turns, counter, qfirst, qlast, stride_ib, scale, scale_log2, Tq, Tk, Hq, tiles, heads, together, zero,
    q_shared: gl.constexpr, k_shared: gl.constexpr, v_shared: gl.constexpr, ds_shared: gl.constexpr, row_shared: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, FENCE_LAST: gl.constexpr, ORDERED: gl.constexpr,
    WAYS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv (B, Tk, Hkv, D) and, added to the zeros in dq, dq without the scale; all are
    descriptors.

    dq: fp32, for each head and tile of queries 32 rows of 256, of which each consumer adds 16 (see
    `in_registers`). `counter`: 0. `turns`, ordered: an int32, 0, for each 16 rows of dq.
    """
    dtype: gl.constexpr = q.dtype
    qs = gl.allocate_shared_memory(dtype, [2, BM, D], q_shared)
    dos = gl.allocate_shared_memory(dtype, [2, BM, D], q_shared)
    ks = gl.allocate_shared_memory(dtype, [1, BN, D], k_shared)
    vs = gl.allocate_shared_memory(dtype, [2, KEYS, D], v_shared)
    lses = gl.allocate_shared_memory(gl.float32, [2, 1, BM], row_shared)
    deltas = gl.allocate_shared_memory(gl.float32, [2, 1, BM], row_shared)
    dss = gl.allocate_shared_memory(dtype, [2, BN, BM], ds_shared)
    parts = gl.allocate_shared_memory(gl.float32, [2, 16, 256], row_shared)
    # where dk leaves from, and if it has the place, in ds, dv: else that takes v's
    stages = reinterpret(
        dss if BM >= 2 * D else parts, dtype, [8 if BM >= 2 * D else 2, KEYS, D], v_shared
    )
    qf = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dof = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kf = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ke = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    vf = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ve = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mail = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    mf = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    me = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kf, count=1)
    mbarrier.init(ke, count=2)
    mbarrier.init(vf, count=1)
    mbarrier.init(ve, count=2)
    for i in gl.static_range(2):
        mbarrier.init(mf.index(i), count=1)
        mbarrier.init(me.index(i), count=4)
        mbarrier.init(read.index(i), count=1)
        mbarrier.init(qf.index(i), count=1)
        mbarrier.init(dof.index(i), count=1)
    # fmt: off
    gl.warp_specialize([
        (consumer, (qs, ks, vs, dos, lses, deltas, dss, parts.index(0), stages, qf, dof, kf, ke, vf, ve, read.index(0), mail, mf, me,
                    qfirst, qlast, stride_ib, scale, scale_log2, Tk, Hq, tiles, heads, together, zero, GROUP, D, BM, BN, FENCE_LAST, ORDERED, WAYS, 0)),
        (consumer, (qs, ks, vs, dos, lses, deltas, dss, parts.index(1), stages, qf, dof, kf, ke, vf, ve, read.index(1), mail, mf, me,
                    qfirst, qlast, stride_ib, scale, scale_log2, Tk, Hq, tiles, heads, together, zero, GROUP, D, BM, BN, FENCE_LAST, ORDERED, WAYS, 1)),
        (producer, (q, k, v, do, lse2, delta, qs, ks, vs, dos, lses, deltas, qf, dof, kf, ke, vf, ve, mail, mf, me, counter,
                    qfirst, qlast, stride_ib, Tq, Tk, Hq, tiles, heads, together, GROUP, D, BM, BN, ORDERED, WAYS)),
        (writer, (dq, dk, dv, parts.index(0), stages, vs, read.index(0), ve, mail, mf, me, turns, qfirst, qlast, stride_ib, Tq, Tk, Hq, tiles,
                  heads, together, GROUP, D, BM, BN, ORDERED, WAYS, 0)),
        (writer, (dq, dk, dv, parts.index(1), stages, vs, read.index(1), ve, mail, mf, me, turns, qfirst, qlast, stride_ib, Tq, Tk, Hq, tiles,
                  heads, together, GROUP, D, BM, BN, ORDERED, WAYS, 1)),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])
    # fmt: on


@triton.jit(do_not_specialize=["T", "H"])
def unpack_kernel(sums, out, scale, T, H, D: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr):
    """out (B, T, H, D) = scale · sums (B, H, tiles, BM · PAD), of which every half is in the order
    of `in_registers`.
    """
    tile, tiles = tl.program_id(0), tl.cdiv(T, BM)
    m, bh = tile % tiles, tile // tiles
    x = tl.load(sums + tile.to(tl.int64) * BM * PAD + tl.arange(0, BM * PAD)) * scale
    x = x.to(out.dtype.element_ty).reshape(
        [2, 8, 4, 8, 4, 2, 2]
    )  # consumer, then as in in_registers, permuted
    x = x.permute((2, 5, 3, 0, 1, 4, 6) if BM == 64 else (0, 2, 5, 3, 1, 4, 6)).reshape([BM, PAD])
    i, c = m * BM + tl.arange(0, BM)[:, None], tl.arange(0, PAD)[None, :]
    tl.store(
        out + (((bh // H).to(tl.int64) * T + i) * H + bh % H) * D + c, x, mask=(i < T) & (c < D)
    )


def ways(head_dim: int, group: int, ordered: bool) -> int:
    """2 where walks go down as well as up, see hopper_order.py; at 64 channels the registers that
    it takes cost more than it saves.
    """
    return 2 if ordered or (head_dim == 128 and group > 1) else 1


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
    ordered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous, for the keys' intervals (B or 1, Tk); see `portable.backward`.
    `ordered`: the same bits every time.
    """
    B, Tq, Hq, D = q.shape
    Tk, Hkv = k.shape[1:3]
    PAD = max(64, triton.next_power_of_2(D))
    c = CONFIGS[PAD]
    q, k, v, do = (addressable(x) for x in (q, k, v, do))
    lse2, delta = (x.view(B * Hq, -1) for x in rows_of_backward(do, dlse, out, lse))
    dk, dv = (
        torch.empty(k.shape, dtype=k.dtype, device=k.device),
        torch.empty(v.shape, dtype=v.dtype, device=v.device),
    )
    sums = torch.zeros(
        B * Hq * triton.cdiv(Tq, c.BM), c.BM * PAD // 256, 256, dtype=torch.float32, device=q.device
    )
    counter = torch.zeros(4 + (2 * len(sums) if ordered else 0), dtype=torch.int32, device=q.device)
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    rows = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, c.BM], ROW_LAYOUT)
        for x in (lse2, delta)
    )
    tiles = triton.cdiv(Tk, c.BN)
    together = heads_together(q, B * Hkv, 1)
    with torch.cuda.device(q.device):
        backward_kernel[(min(tiles * B * Hkv, processors(q.device)),)](
            *(descriptor(x, n, PAD, dtype) for x, n in ((q, c.BM), (k, c.BN), (v, 64), (do, c.BM))),
            *rows,
            TensorDescriptor(sums, [sums.numel() // 256, 256], [256, 1], [16, 256], ROW_LAYOUT),
            *(descriptor(x, 64, PAD, dtype) for x in (dk, dv)),
            *(
                counter[4 if ordered else 0 :],
                counter,
                qfirst,
                qlast,
                batch_stride(qfirst),
                scale,
                scale * LOG2E.value,
            ),
            *(Tq, Tk, Hq, tiles, B * Hkv, together, 0),
            *(shared_layout((n, PAD), dtype) for n in (c.BM, c.BN, 64)),
            *(shared_layout((c.BN, c.BM), dtype), ROW_LAYOUT),
            **dict(
                GROUP=Hq // Hkv, D=PAD, BM=c.BM, BN=c.BN, FENCE_LAST=c.fence_last, ORDERED=ordered
            ),
            **dict(WAYS=ways(PAD, Hq // Hkv, ordered), REGISTERS=c.registers),
            num_warps=4,
        )
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        unpack_kernel[(sums.shape[0],)](sums, dq, scale, Tq, Hq, D, PAD, c.BM, num_warps=8)
    return dq, dk, dv
