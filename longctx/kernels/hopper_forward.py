"""FlashAttention forward for Hopper in Gluon: warp-specialized, persistent, exact (the structure is
that of arXiv 2407.08608).

Equations, letters and masks are those of portable.py. One warp, the producer, brings q, k and v by
TMA; each consumer warpgroup owns 64 queries. A consumer keeps two products in flight: while the
tensor cores multiply p(j-1)·v(j-1) it has s(j) = q·k(j) and takes its softmax. Named barriers let
consumers issue their products in turn, so that one multiplies while another exponentiates. The
programs are persistent: each takes every n-th tile of queries, longest first, and the producer runs
ahead into the next tile. Tiles are counted from the last query, so that the one that is not full,
and begins before query 0, is a short one.

Softmax subtracts a maximum only so that nothing leaves the range of numbers. A row keeps the one
that it has after the tiles that need the mask: those that follow need no maximum and no scaling,
and do not depend on one another. Where the sum of a row leaves 2^±32 after all, its tile is noted,
and done again with a maximum that follows the scores by a second launch, which ends at once if no
tile was noted. fp16 has no such range, and its maximum always follows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
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

from longctx.kernels.gluon import shared_layout, tma_load, tma_store
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
from longctx.kernels.portable import LN2, LOG2E
from longctx.kernels.walk import batch_stride, boundary, heads_together, place, walk


class Config(NamedTuple):
    """BN keys of a tile, stages of the K and V rings, consumers and their registers.

    `turns`: consumers issue their products in turn. `overlap`: softmax is kept ahead of the wait
    for the product before it. `peeled`: tiles that need the mask have a loop of their own also
    where the maximum follows the scores.
    """

    BN: int
    stages: int
    consumers: int
    registers: int
    turns: bool
    overlap: bool
    peeled: bool


CONFIGS = {
    64: Config(128, 3, 3, 160, True, False, True),
    128: Config(128, 2, 2, 240, True, True, False),
}  # by head size
# Of the hardware's 16 named barriers, of which Triton takes 0 to 4 for four partitions. They cost
# less than an mbarrier's arrival, for which a consumer's warps wait for one another.
KEMPTY = gl.constexpr(5)  # a tile of k has been read: 5 + stage
VEMPTY = gl.constexpr(9)  # a tile of v has been read: 9 + stage
TURN = gl.constexpr(13)  # the turn of a consumer: 13 + consumer
MOST_STAGES = gl.constexpr(4)
LARGEST = gl.constexpr(2.0**32)  # sum of a row whose maximum is kept
ROWS = gl.constexpr(64)  # queries of a consumer warpgroup


@gluon.jit
def following(t, end, counter, again, AGAIN: gl.constexpr):
    """The tile that this program does once t is handed out to it: t, or where tiles are done again,
    the next that was noted.
    """
    if AGAIN:
        while (t < end) & (gl.load(again + 1 + t, mask=t < end, other=0) == 0):
            t = gl.atomic_add(counter, 1) + gl.num_programs(0)
    return t


@gluon.jit
def first_query(rank, Tq, tiles, BM: gl.constexpr, BN: gl.constexpr):
    """Of the rank-th tile from the end. Where tiles are longer than those of keys, it is the first
    that is not full, a short one.

    It then begins before query 0, and some consumers have no part in it.
    """
    end = tiles * BM
    if BM > BN:
        end = gl.cdiv(Tq, ROWS) * ROWS
    return end - (rank + 1) * BM


@gluon.jit
def producer(
    q, k, v, qs, ks, vs, qf, qe, kf, vf, mail, mf, me, counter, again, first, last, stride_ib, Tq, Hq, tiles, heads, together,
    GROUP: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """Hands out tiles in the order of the schedule, to this program's consumers by mail, and loads
    what they need.
    """
    gl.static_assert(STAGES <= MOST_STAGES, "there are named barriers for four stages")
    BM: gl.constexpr = ROWS * CONSUMERS
    it = 0
    done = 0
    end = tiles * heads
    if AGAIN:
        end *= gl.load(again)
    t = following(gl.program_id(0), end, counter, again, AGAIN)
    while t < end:
        send(mail, mf, me, done, t)
        rank, bh = place(t, tiles, heads, together)
        m0 = first_query(rank, Tq, tiles, BM, BN)
        b = bh // Hq
        h = bh % Hq
        hk = h // GROUP
        lo, full_lo, full_hi, masked = walk(
            first + b * stride_ib,
            last + b * stride_ib,
            gl.maximum(m0, 0),
            gl.minimum(m0 + BM, Tq),
            BN,
        )
        n = masked + full_hi - full_lo
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(qe.index(c), (done & 1) ^ 1)
            mbarrier.expect(qf.index(c), ROWS * D * 2)
            tma_load(
                q,
                [b, gl.maximum(m0 + c * ROWS, 0), h, 0],
                qf.index(c),
                qs.index(c).reshape([1, ROWS, 1, D]),
            )
        for i in range(n):
            j = gl.where(i < masked, boundary(i, lo, full_lo, full_hi), full_lo + i - masked) * BN
            s = it % STAGES
            if it >= STAGES:
                bar_sync(KEMPTY + s, 128 * CONSUMERS + 32)
            mbarrier.expect(kf.index(s), BN * D * 2)
            tma_load(k, [b, j, hk, 0], kf.index(s), ks.index(s).reshape([1, BN, 1, D]))
            if it >= STAGES:
                bar_sync(VEMPTY + s, 128 * CONSUMERS + 32)
            mbarrier.expect(vf.index(s), BN * D * 2)
            tma_load(v, [b, j, hk, 0], vf.index(s), vs.index(s).reshape([1, BN, 1, D]))
            it += 1
        t = following(gl.atomic_add(counter, 1) + gl.num_programs(0), end, counter, again, AGAIN)
        done += 1
    send(mail, mf, me, done, -1)
    for x in range(gl.maximum(it - STAGES, 0), it):
        bar_sync(KEMPTY + x % STAGES, 128 * CONSUMERS + 32)
        bar_sync(VEMPTY + x % STAGES, 128 * CONSUMERS + 32)


@gluon.jit
def row_sums(p, ROWS: gl.constexpr, BN: gl.constexpr):
    """Sums of each row over the columns that a thread holds, (rows, 4): the four threads of a row
    are added at the end.
    """
    return gl.sum(gl.sum(p.reshape([ROWS, BN // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def softmax(s, m, scale_log2, masked, n0, first_i, last_i):
    """Online softmax of one tile: p unnormalized, the new m, and what the old sums are scaled by."""
    if masked:
        s = hide(s, n0, first_i, last_i, True, True)
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, m_new, gl.exp2(m - shift)


@gluon.jit
def advance(
    q, p16, m, l, acc, ks, vs, kf, vf, it, pending, more, masked, n0, first_i, last_i, scale_log2,
    BN: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, OVERLAP: gl.constexpr, KEEP: gl.constexpr,
    C: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Scores of the it-th tile of keys while the one pending, p16, is multiplied by v: the new p16,
    m, l, acc. `KEEP`: m stays.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    o_layout: gl.constexpr = acc.type.layout
    now, before, after = it % STAGES, pending % STAGES, (it + 1) % STAGES
    zeros = gl.zeros([ROWS, BN], gl.float32, layout=s_layout)
    if TURNS:
        bar_sync(TURN + C, 256)
    sa = warpgroup_mma(q, ks.index(now).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(vf.index(before), (pending // STAGES) & 1)
    oa = warpgroup_mma(p16, vs.index(before), acc, is_async=True)
    if TURNS:
        bar_arrive(TURN + (C + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(1, deps=(sa,))
    bar_arrive(KEMPTY + now, 128 * CONSUMERS + 32)
    if KEEP:
        p = gl.exp2(s * scale_log2 - m[:, None])
        l += row_sums(p, ROWS, BN)
    else:
        p, m, alpha = softmax(s, m, scale_log2, masked, n0, first_i, last_i)
        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + row_sums(
            p, ROWS, BN
        )
    p16 = gl.convert_layout(
        p.to(p16.dtype), gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    )
    if OVERLAP:
        # a wait that loops: ptxas moves no exponential past it, so they run while the tensor cores
        # multiply p·v
        mbarrier.wait(kf.index(after), ((it + 1) // STAGES) & 1, pred=more)
    acc, p16 = warpgroup_mma_wait(0, deps=(oa, p16))
    if not OVERLAP:
        mbarrier.wait(kf.index(after), ((it + 1) // STAGES) & 1, pred=more)
    bar_arrive(VEMPTY + before, 128 * CONSUMERS + 32)
    if not KEEP:
        acc *= gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
    return p16, m, l, acc


@gluon.jit
def skip(
    kf,
    vf,
    it,
    more,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    C: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Gives back the it-th tile of keys, of which this consumer sees none."""
    now, after = it % STAGES, (it + 1) % STAGES
    if TURNS:
        bar_sync(TURN + C, 256)
        bar_arrive(TURN + (C + 1) % CONSUMERS, 256)
    bar_arrive(KEMPTY + now, 128 * CONSUMERS + 32)
    mbarrier.wait(vf.index(now), (it // STAGES) & 1)
    bar_arrive(VEMPTY + now, 128 * CONSUMERS + 32)
    mbarrier.wait(kf.index(after), ((it + 1) // STAGES) & 1, pred=more)


@gluon.jit
def consumer(
    out, lse, qs, ks, vs, outs, qf, qe, kf, vf, mail, mf, me, again, first, last, stride_ib, scale_log2, Tq, Hq, tiles, heads, together,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr, OVERLAP: gl.constexpr,
    PEELED: gl.constexpr, KEEP: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out.dtype
    BM: gl.constexpr = ROWS * CONSUMERS
    SKIPS: gl.constexpr = BM > BN  # else a tile on the diagonal is seen by all
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    zeros = gl.zeros([ROWS, BN], gl.float32, layout=s_layout)
    if TURNS and C == CONSUMERS - 1:
        bar_arrive(TURN, 256)
    it = 0
    done = 0
    q_mine = qs.index(C)
    out_mine = outs.index(C)
    t = receive(mail, mf, me, done, 4)
    while t >= 0:
        rank, bh = place(t, tiles, heads, together)
        m0 = first_query(rank, Tq, tiles, BM, BN)
        b = bh // Hq
        h = bh % Hq
        lo, full_lo, full_hi, masked = walk(
            first + b * stride_ib,
            last + b * stride_ib,
            gl.maximum(m0, 0),
            gl.minimum(m0 + BM, Tq),
            BN,
        )
        n = masked + full_hi - full_lo
        # this consumer's queries, if it has any, see keys from lower to upper
        mine = m0 + C * ROWS
        lower = gl.load(first + b * stride_ib + gl.maximum(mine, 0), mask=mine < Tq, other=0)
        upper = gl.load(
            last + b * stride_ib + gl.minimum(mine + ROWS, Tq) - 1, mask=mine >= 0, other=-1
        )
        i = mine + gl.arange(0, ROWS, layout=s_rows)
        end = Tq if not SKIPS else gl.where(mine >= 0, Tq, mine)  # of this consumer's queries
        first_i = gl.load(first + b * stride_ib + i, mask=i < end, other=0)
        last_i = gl.load(last + b * stride_ib + i, mask=i < end, other=-1)
        m = gl.full([ROWS], float("-inf"), gl.float32, layout=s_rows)
        acc = gl.zeros([ROWS, D], gl.float32, layout=o_layout)
        mbarrier.wait(qf.index(C), done & 1)
        if n > 0:
            mbarrier.wait(kf.index(it % STAGES), (it // STAGES) & 1)
            if TURNS:
                bar_sync(TURN + C, 256)
            sa = warpgroup_mma(
                q_mine, ks.index(it % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            if TURNS:
                bar_arrive(TURN + (C + 1) % CONSUMERS, 256)
            s = warpgroup_mma_wait(0, deps=(sa,))
            bar_arrive(KEMPTY + it % STAGES, 128 * CONSUMERS + 32)
            n0 = gl.where(masked > 0, boundary(0, lo, full_lo, full_hi), full_lo) * BN
            p, m, _ = softmax(s, m, scale_log2, True, n0, first_i, last_i)
            l = row_sums(p, ROWS, BN)
            p16 = gl.convert_layout(p.to(dtype), p_layout)
            mbarrier.wait(kf.index((it + 1) % STAGES), ((it + 1) // STAGES) & 1, pred=n > 1)
            alone = n
            if PEELED or KEEP:
                alone = gl.maximum(masked, 1)
            # its v is held meanwhile: for one tile less than there are stages, since the next k
            # comes after all v before it
            pending = it
            for x in range(1, alone):
                n0 = boundary(x, lo, full_lo, full_hi) * BN
                if not SKIPS or (x >= masked) | (n0 <= upper) & (n0 + BN > lower) | (
                    it + x - pending >= STAGES - 1
                ):
                    p16, m, l, acc = advance(
                        q_mine, p16, m, l, acc, ks, vs, kf, vf, it + x, pending if SKIPS else it + x - 1, x + 1 < n,
                        PEELED or KEEP or x < masked, n0, first_i, last_i, scale_log2, BN, STAGES, TURNS, OVERLAP, False, C, CONSUMERS,
                    )  # fmt: skip
                    pending = it + x
                else:
                    skip(kf, vf, it + x, x + 1 < n, STAGES, TURNS, C, CONSUMERS)
            if KEEP:
                m = gl.where(
                    (m == float("-inf")) & (alone < n), 0.0, m
                )  # of a row that saw no tile so far, and will
            if PEELED or KEEP:
                for x in range(alone, n):
                    p16, m, l, acc = advance(
                        q_mine, p16, m, l, acc, ks, vs, kf, vf, it + x, pending if SKIPS else it + x - 1, x + 1 < n,
                        False, 0, first_i, last_i, scale_log2, BN, STAGES, TURNS, OVERLAP, KEEP, C, CONSUMERS,
                    )  # fmt: skip
                    pending = it + x
            if not SKIPS:
                pending = it + n - 1
            mbarrier.arrive(qe.index(C), count=1)
            mbarrier.wait(vf.index(pending % STAGES), (pending // STAGES) & 1)
            oa = warpgroup_mma(p16, vs.index(pending % STAGES), acc, is_async=True)
            total = gl.convert_layout(gl.sum(l, axis=1), s_rows)
            if KEEP:
                left = (alone < n) & (i < end) & ~((total > 1 / LARGEST) & (total < LARGEST))
                gl.store(again + gl.zeros_like(i), 1, mask=left)
                gl.store(again + 1 + t + gl.zeros_like(i), 1, mask=left)
            total = gl.where(total == 0.0, 1.0, total)
            gl.store(lse + bh.to(gl.int64) * Tq + i, m * LN2 + gl.log(total), mask=i < end)
            acc = warpgroup_mma_wait(0, deps=(oa,))
            bar_arrive(VEMPTY + pending % STAGES, 128 * CONSUMERS + 32)
            acc = acc * (1.0 / gl.convert_layout(total, o_rows))[:, None]
        else:
            mbarrier.arrive(qe.index(C), count=1)
            gl.store(lse + bh.to(gl.int64) * Tq + i, m, mask=i < end)
        tma.store_wait(0)
        out_mine.store(acc.to(dtype))
        fence_async_shared()
        if not SKIPS or mine >= 0:
            tma_store(out, [b, mine, h, 0], out_mine.reshape([1, ROWS, 1, D]))
        it += n
        done += 1
        t = receive(mail, mf, me, done, 4)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["Tq", "Hq", "tiles", "heads", "together"])
def forward_kernel(
    q, k, v, out, lse, counter, again, first, last, stride_ib, scale_log2, Tq, Hq, tiles, heads, together,
    shared: gl.constexpr, shared_kv: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
    TURNS: gl.constexpr, OVERLAP: gl.constexpr, PEELED: gl.constexpr, KEEP: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """out (B, Tq, Hq, D) contiguous and lse (B, Hq, Tq); q, k, v, out are descriptors of (B, T, H,
    D).

    `counter`: 0. `again`: 1 if some tile is to be done again, then a 1 for each such tile; written
    if `KEEP`, read if `AGAIN`.
    """
    dtype: gl.constexpr = q.dtype
    qs = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D], shared)
    outs = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D], shared)
    ks = gl.allocate_shared_memory(dtype, [STAGES, BN, D], shared_kv)
    vs = gl.allocate_shared_memory(dtype, [STAGES, BN, D], shared_kv)
    qf = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    qe = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    kf = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    vf = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mail = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    mf = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    me = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(mf.index(i), count=1)
        mbarrier.init(me.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(qf.index(i), count=1)
        mbarrier.init(qe.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(kf.index(i), count=1)
        mbarrier.init(vf.index(i), count=1)
    # fmt: off
    # Lists of their own: Triton takes functions and constants only where they are written, not from a variable.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (out, lse, qs, ks, vs, outs, qf, qe, kf, vf, mail, mf, me, again, first, last, stride_ib, scale_log2, Tq, Hq,
                        tiles, heads, together, D, BN, STAGES, CONSUMERS, TURNS, OVERLAP, PEELED, KEEP, 0)),
            (consumer, (out, lse, qs, ks, vs, outs, qf, qe, kf, vf, mail, mf, me, again, first, last, stride_ib, scale_log2, Tq, Hq,
                        tiles, heads, together, D, BN, STAGES, CONSUMERS, TURNS, OVERLAP, PEELED, KEEP, 1)),
            (producer, (q, k, v, qs, ks, vs, qf, qe, kf, vf, mail, mf, me, counter, again, first, last, stride_ib, Tq, Hq, tiles, heads, together,
                        GROUP, D, BN, STAGES, CONSUMERS, AGAIN)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (consumer, (out, lse, qs, ks, vs, outs, qf, qe, kf, vf, mail, mf, me, again, first, last, stride_ib, scale_log2, Tq, Hq,
                        tiles, heads, together, D, BN, STAGES, CONSUMERS, TURNS, OVERLAP, PEELED, KEEP, 0)),
            (consumer, (out, lse, qs, ks, vs, outs, qf, qe, kf, vf, mail, mf, me, again, first, last, stride_ib, scale_log2, Tq, Hq,
                        tiles, heads, together, D, BN, STAGES, CONSUMERS, TURNS, OVERLAP, PEELED, KEEP, 1)),
            (consumer, (out, lse, qs, ks, vs, outs, qf, qe, kf, vf, mail, mf, me, again, first, last, stride_ib, scale_log2, Tq, Hq,
                        tiles, heads, together, D, BN, STAGES, CONSUMERS, TURNS, OVERLAP, PEELED, KEEP, 2)),
            (producer, (q, k, v, qs, ks, vs, qf, qe, kf, vf, mail, mf, me, counter, again, first, last, stride_ib, Tq, Hq, tiles, heads, together,
                        GROUP, D, BN, STAGES, CONSUMERS, AGAIN)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    # fmt: on


def forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out like q, contiguous, and lse (B, Hq, Tq) float32, for intervals (B or 1, Tq); see
    `portable.forward`.
    """
    B, Tq, Hq, D = q.shape
    PAD = max(64, triton.next_power_of_2(D))
    c = CONFIGS[PAD]
    q, k, v = (addressable(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, Hq, Tq, dtype=torch.float32, device=q.device)
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    rows, columns = shared_layout((64, PAD), dtype), shared_layout((c.BN, PAD), dtype)
    tiles = triton.cdiv(Tq, 64 * c.consumers)
    keep = q.dtype == torch.bfloat16
    tensors = [descriptor(x, n, PAD, dtype) for x, n in ((q, 64), (k, c.BN), (v, c.BN), (out, 64))]
    notes = torch.zeros(
        3 + tiles * B * Hq, dtype=torch.int32, device=q.device
    )  # a counter for each launch, then `again`
    with torch.cuda.device(q.device):
        for again in (False, True) if keep else (False,):
            forward_kernel[(min(tiles * B * Hq, processors(q.device)),)](
                *tensors,
                *(
                    lse,
                    notes[again:],
                    notes[2:],
                    first,
                    last,
                    batch_stride(first),
                    scale * LOG2E.value,
                    Tq,
                    Hq,
                    tiles,
                    B * Hq,
                ),
                *(heads_together(k, B * Hq, Hq // k.shape[2]), rows, columns),
                **dict(
                    GROUP=Hq // k.shape[2], D=PAD, BN=c.BN, STAGES=c.stages, CONSUMERS=c.consumers
                ),
                **dict(REGISTERS=c.registers, TURNS=c.turns, OVERLAP=c.overlap, PEELED=c.peeled),
                **dict(KEEP=keep and not again, AGAIN=again),
                num_warps=4,
            )
    return out, lse
