"""FlashAttention forward for Hopper in Gluon: warp-specialized, persistent, exact.

The structure is that of FlashAttention-3 (arXiv 2407.08608); equations, letters and masks are those
of portable.py.

One warp, the producer, loads q, k and v by TMA. Each consumer warpgroup owns 64 queries and keeps
two products in flight: while the tensor cores multiply p(j-1)·v(j-1) it has s(j) = q·k(j) and takes
its softmax. Named barriers let the consumers issue their products in turn (ping-pong), so that one
multiplies while another exponentiates:

    producer     k(j+1), v(j)          | k(j+2), v(j+1)        | ...
    consumer 0   q·k(j), p·v(j-1)      | softmax(j)            | q·k(j+1), p·v(j) | ...
    consumer 1   softmax(j-1)          | q·k(j), p·v(j-1)      | softmax(j)       | ...

A score costs 4 D FLOPs and one exponential; a multiprocessor does 4,096 and 16 of them per clock.
So exponentials take as long as products at 64 channels and half as long at 128.

Registers set the number of consumers: of 65,536, two take 128 · (2 · 240 + 24) and three 128 ·
(3 · 160 + 24). The 24 are the producer's; it counts as a warpgroup. At 128 channels a thread
holds 64 numbers of s, 64 of o and 32 registers of p, at 64 channels half of that o. Shared memory
sets keys and stages: q, out and the rings of k and v take 192 KiB, 144 at 64 channels.

Programs are persistent: each takes the next tile of queries from a counter, the longest first, and
its producer runs ahead into that tile. If tiles of queries are longer than tiles of keys, tiles are
counted from the last query: the partial one begins before query 0, is short, and some consumers
have no part in it. In packed rows tiles begin with each document, which spares a masked step each.

Softmax subtracts a maximum only so that nothing leaves the range of numbers. In bf16 a row keeps
its maximum after the masked tiles (`FIXED_MAX`): the next tiles need no maximum and no scaling, and
do not depend on one another. The largest p of such a row need not be 1, so bf16 rounds it. If one
key draws nearly all weight, o would lean by up to 2^-9, in all channels alike. Therefore p·v is
divided by the sum of p as rounded, l + r: l, of p in fp32, gives lse, and r is the sum of rounding
errors. A tile adds to r only if some thread's quarter of a row's p sums to more than `HEAVY` of l
so far: lighter errors do not lean all one way. (Many keys that are alike do, if each of them is
light. o leans then by less than its own rounding.) If the sum of a row leaves 2^±32 after all, its
tile is flagged, and the program computes it again, two tiles later, as if all keys needed a mask:
then the maximum follows the scores. fp16 has no such range, and its maximum always follows.

Heads of 96 and 192 channels have two parts, 64 + 32 and 128 + 64, since sides of tiles are powers
of two: q·kᵀ is the sum of two products, and o has two accumulators. q, k, v, o and their buffers
are tuples of parts.

Buffers in shared memory: qs, ks, vs, outs. mbarriers: X_full, X has been written; X_empty, X has
been read. A tile of keys is step `it` of a program: ring slot it % STAGES, phase it // STAGES & 1.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from longctx.kernels.attention import Intervals, Scores, hopper_size
from longctx.kernels.attention.hopper_primitives import (
    ROW_LAYOUT,
    addressable,
    at_index,
    bar_arrive,
    bar_sync,
    descriptor,
    exponents,
    finished,
    load_parts,
    map_of_rows,
    mask_scores,
    mbarriers,
    of_bias,
    part_buffers,
    pop_all,
    push,
    rounding_error,
    shared_layout,
    softcapped,
    split,
    start_scores,
    start_sum,
    store_parts,
    tile_queue,
    tma_load,
    zero_parts,
    zero_product,
)
from longctx.kernels.attention.launch import multiprocessors, unused_zeros
from longctx.kernels.attention.portable import (
    LN2,
    LOG2E,
    batch_stride,
    heads_in_l2,
    masked_tile,
    scheduled_tile,
    sinks_or,
    visible_tiles,
)
from longctx.kernels.attention.relaunch import LAUNCHES, Relaunch, first_launch, stream_of


class ForwardConfig(NamedTuple):
    """BN keys of a tile, stages of the K and V rings, consumers and their registers: constants of
    the kernel, by these names in capitals.

    `pingpong`: consumers issue their products in turn. `overlap`: softmax stays ahead of the wait
    for the product before it. `own_bounds`: a consumer masks only what its own queries see in part.
    `out_in_q`: out leaves from q's memory, and q is loaded again. `by_document`: tiles of `starts`.
    `fixed_max`: in bf16 the maximum of a row stays.
    """

    BN: int
    stages: int
    consumers: int
    registers: int
    pingpong: bool
    overlap: bool
    own_bounds: bool = False
    out_in_q: bool = False
    by_document: bool = False
    fixed_max: bool = True


class ForwardBuffers(NamedTuple):
    """Shared memory that the producer loads; qs, ks, vs are tuples of the channels' parts.
    `biases`, or None: of tiles of keys by step, then of queries' last keys by tile and consumer.
    """

    qs: Any
    ks: Any
    vs: Any
    biases: Any


class ForwardLoaded(NamedTuple):
    """mbarriers: q, k, v are written; q has been read."""

    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any


CONFIGS = {  # by head size
    64: ForwardConfig(128, 3, 3, 160, True, False),
    96: ForwardConfig(128, 4, 2, 240, True, False, out_in_q=True),
    128: ForwardConfig(128, 2, 2, 240, True, True),
    192: ForwardConfig(64, 3, 2, 240, True, False, out_in_q=True),
    256: ForwardConfig(64, 2, 2, 240, True, False, out_in_q=True),
}
# Configs that are faster for a span of `Intervals` and a head size. In short windows consumers do
# not take turns. Documents and short sequences have many tiles that are seen in part, and fewer
# with fewer queries in each. One H200, ms with CONFIGS → with these: documents of 3,000, heads of
# 64: 2.42 → 1.86, of 128: 2.92 → 2.70; heads of 64, 16 × 1,024: 0.259 → 0.231
OTHER_CONFIGS = {
    ("short", 256): CONFIGS[256]._replace(pingpong=False),
    ("medium", 256): CONFIGS[256]._replace(pingpong=False),
    ("short", 64): ForwardConfig(64, 4, 3, 160, False, False, True),
    ("medium", 64): ForwardConfig(128, 4, 2, 240, True, False, True),
    ("medium", 128): CONFIGS[128]._replace(own_bounds=True),
    ("brief", 64): ForwardConfig(128, 4, 2, 240, True, False, True),
    ("packed", 64): ForwardConfig(128, 4, 2, 240, True, False, True, by_document=True),
    ("brief", 128): CONFIGS[128]._replace(own_bounds=True, fixed_max=False),  # 1% faster
    ("packed", 128): CONFIGS[128]._replace(own_bounds=True, by_document=True),
}
ROWS = gl.constexpr(64)  # queries of a consumer warpgroup
LARGEST = gl.constexpr(2.0**32)  # sum of a row whose maximum is fixed
HEAVY = gl.constexpr(0.125)  # part of a row's sum; few tiles of unit-variance scores have it
# Of the hardware's 16 named barriers Triton takes 0 to 4 for four partitions. They cost less than
# an mbarrier's arrival, for which a consumer's warps wait for one another.
K_EMPTY = gl.constexpr(5)  # 5 + stage: a tile of k has been read
V_EMPTY = gl.constexpr(9)  # 9 + stage: a tile of v has been read
TURN = gl.constexpr(13)  # 13 + consumer: it may issue its products
MOST_STAGES = gl.constexpr(4)
# A tile's sink and flags are read when its successor may be in the queue, and another behind it
TILE_SLOTS = gl.constexpr(4)
# More than stages: a tile's bias arrives with k, and is read until the next k is given back
BIAS_SLOTS = gl.constexpr(8)


@gluon.jit
def flagged(flags, count, CONSUMERS: gl.constexpr):
    """Return 1, once, if the fixed maximum of a program's count-th tile did not hold."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    found = 0
    for c in gl.static_range(CONSUMERS):
        own = flags.index(count % TILE_SLOTS * CONSUMERS + c)
        found |= gl.max(own.load(layout), axis=0)
        own.store(gl.zeros([ROWS], gl.int32, layout=layout))
    return found


@gluon.jit
def own_sink(sink_slots, count, biases, own, s_layout: gl.constexpr):
    """Return the sink of a consumer's count-th tile. A pointer would be in registers meanwhile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    sink = gl.max(sink_slots.index(count % TILE_SLOTS).load(layout), axis=0)
    if biases is not None:
        sink -= gl.sum(biases.index(own).slice(0, ROWS, 1).permute((1, 0)).load(s_layout), axis=1)
    return sink


@gluon.jit
def biased(s, biases, it, own, scale_log2):
    """Return scores with the bias of the it-th tile of keys, less that of each query's last key."""
    if biases is not None:
        bias_r = biases.index(own).slice(0, ROWS, 1).permute((1, 0)).load(s.type.layout)
        bias_j = biases.index(it % BIAS_SLOTS).load(s.type.layout)
        s += (bias_j - bias_r) * (LOG2E / scale_log2)
    return s


@gluon.jit
def own_tile(
    rank, b, starts, first, last, stride_ib, Tq, tiles,
    BM: gl.constexpr, BN: gl.constexpr, BY_DOCUMENT: gl.constexpr,
):  # fmt: skip
    """Return the first query of the rank-th tile from the end, and an end of its queries; by how
    much its tiles of keys begin before multiples of BN; their `visible_tiles`, and how many.
    """
    if BY_DOCUMENT:
        starts += b * gl.where(stride_ib > 0, Tq + 1, 0) + tiles - 1 - rank
        m0 = gl.load(starts)  # Tq, if other rows have more tiles
        tile_end = gl.minimum(m0 + BM, gl.load(starts + 1))
        # a document's first key begins a tile of keys, and so does the first query's own key
        keys_before = -m0 & (BN - 1)
        start, end = gl.minimum(m0, Tq - 1), tile_end
    else:
        m0 = (gl.cdiv(Tq, ROWS) * ROWS if BM > BN else tiles * BM) - (rank + 1) * BM
        tile_end, keys_before = Tq, 0
        start, end = gl.maximum(m0, 0), gl.minimum(m0 + BM, Tq)
    lo, full_lo, full_hi, masked = visible_tiles(
        first + b * stride_ib, last + b * stride_ib, start, end, BN, keys_before
    )
    n = masked + full_hi - full_lo
    if BY_DOCUMENT:
        n = gl.where(m0 < tile_end, n, 0)
    return m0, tile_end, keys_before, lo, full_lo, full_hi, masked, n


@gluon.jit
def store_rows(out, acc, i, end, b, h, Tq, Hq, D: gl.constexpr):
    """Store rows i < end of acc; those behind are of another tile, and TMA would write them."""
    layout: gl.constexpr = acc.type.layout
    i = gl.convert_layout(i, gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    at = ((b * Tq + i.to(gl.int64)) * Hq + h) * D + d
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=(i < end) & (d < D))


@gluon.jit
def producer(
    q, k, v, bias, references,
    buffers, loaded, queue, sink_slots, counter, flags, sinks, schedule,
    GROUP: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, BY_DOCUMENT: gl.constexpr, FIXED_MAX: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """Hand out tiles in the order of the schedule, and load the consumers' operands."""
    qs, ks, vs, biases = buffers
    BIASES: gl.constexpr = 0 if bias is None else BN
    q_full, q_empty, k_full, v_full = loaded
    first, last, starts, stride_ib, Tq, Hq, grid_tiles, heads, l2_heads = schedule
    tiles = gl.load(starts + Tq) if BY_DOCUMENT else grid_tiles
    gl.static_assert(STAGES <= MOST_STAGES, "there are named barriers for four stages")
    BM: gl.constexpr = ROWS * CONSUMERS
    it = 0
    count = 0
    end = tiles * heads
    t = gl.program_id(0)
    t_before, t_last, again = t, t, 0
    met = 0  # steps whose arrivals at the end of a ring were met
    if FIXED_MAX:
        for slot in gl.static_range(TILE_SLOTS):
            flagged(flags, slot, CONSUMERS)
    while t < end:
        rank, row_head = scheduled_tile(t, tiles, heads, l2_heads)
        if SINKS:
            one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            zero = gl.zeros([1], gl.float32, layout=one)
            sink_slots.index(count % TILE_SLOTS).store(zero + gl.load(sinks + row_head % Hq))
        b = row_head // Hq
        h = row_head % Hq
        hk = h // GROUP
        m0, tile_end, keys_before, lo, full_lo, full_hi, masked, n = own_tile(
            rank, b, starts, first, last, stride_ib, Tq, tiles, BM, BN, BY_DOCUMENT
        )
        if again > 0:
            full_lo, full_hi, masked = lo + n, lo + n, n
        seen = lo, full_lo, full_hi, masked, n
        push(queue, count, (t, row_head, m0, tile_end, keys_before) + seen)  # noqa: RUF005
        # q: one box for each consumer
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (count & 1) ^ 1)
            mbarrier.expect(q_full.index(c), ROWS * D * 2 + BIASES * 4)
            load_parts(q, qs, c, q_full.index(c), b, gl.maximum(m0 + c * ROWS, 0), h)
            if bias is not None:
                own = biases.index(BIAS_SLOTS + count % TILE_SLOTS * CONSUMERS + c)
                tma_load(references, [row_head, gl.maximum(m0 + c * ROWS, 0)], q_full.index(c), own)
        # k and v: the masked tiles, then the others
        for i in range(n):
            j = gl.where(i < masked, masked_tile(i, lo, full_lo, full_hi), full_lo + i - masked)
            j = j * BN - keys_before
            s = it % STAGES
            if it >= met + STAGES:
                bar_sync(K_EMPTY + s, 128 * CONSUMERS + 32)
            mbarrier.expect(k_full.index(s), BN * D * 2 + BIASES * 4)
            load_parts(k, ks, s, k_full.index(s), b, j, hk)
            if bias is not None:
                tma_load(bias, [row_head, j], k_full.index(s), biases.index(it % BIAS_SLOTS))
            if it >= met + STAGES:
                bar_sync(V_EMPTY + s, 128 * CONSUMERS + 32)
            mbarrier.expect(v_full.index(s), BN * D * 2)
            load_parts(v, vs, s, v_full.index(s), b, j, hk)
            it += 1
        # the next tile: the one before the last, if it was flagged; if no other is left, the last
        redo, then = 0, t_before
        if FIXED_MAX:
            redo = flagged(flags, count + TILE_SLOTS - 2, CONSUMERS)
        if redo == 0:
            then = gl.atomic_add(counter, 1) + gl.num_programs(0)
            if FIXED_MAX and then >= end:
                meet(gl.maximum(it - STAGES, met), it, STAGES, CONSUMERS)
                met = it
                redo = flagged(flags, count + TILE_SLOTS - 1, CONSUMERS)
                then = gl.where(redo > 0, t_last, then)
                if redo == 0:
                    redo = flagged(flags, count, CONSUMERS)
                    then = gl.where(redo > 0, t, then)
        t_before, t_last, t, again = t_last, t, then, redo
        count += 1
    push(queue, count, (-1,))
    meet(gl.maximum(it - STAGES, met), it, STAGES, CONSUMERS)


@gluon.jit
def meet(start, end, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Meet the consumers as they give back k and v of steps for which no load waits."""
    for x in range(start, end):
        bar_sync(K_EMPTY + x % STAGES, 128 * CONSUMERS + 32)
        bar_sync(V_EMPTY + x % STAGES, 128 * CONSUMERS + 32)


@gluon.jit
def row_sums(p, ROWS: gl.constexpr, BN: gl.constexpr):
    """Return the sums of each row over the columns that a thread holds, (rows, 4).

    The four threads of a row are added at the end.
    """
    return gl.sum(gl.sum(p.reshape([ROWS, BN // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def bounded(s, n0, first_i, last_i, inner, OWN_BOUNDS: gl.constexpr):
    """Return s with -inf where query i does not see a key from n0 on."""
    before, after = True, True
    if OWN_BOUNDS:
        before, after = n0 < inner[0], n0 + s.shape[1] - 1 > inner[1]
    return mask_scores(s, n0, first_i, last_i, before, after)


@gluon.jit
def softmax(s, m, scale_log2):
    """Return p unnormalized, the new m, and the factor of the old sums, by online softmax."""
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, m_new, gl.exp2(m - shift)


@gluon.jit
def scaled(acc, factor):
    """Return all parts of acc times the factor of each row."""
    return [x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None] for x in acc]


@gluon.jit
def attend(
    q, p16, m, l, r, plain, acc,
    ks, vs, k_full, v_full,
    it, pending, more, masked, n0, first_i, last_i, inner, scale_log2, cap, biases, own,
    BN: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr, OVERLAP: gl.constexpr,
    OWN_BOUNDS: gl.constexpr, FIXED_MAX: gl.constexpr,
    C: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Return p16, m, l, r, plain, acc after step `it`.

    It takes the scores of the it-th tile of keys while p16, that of the pending tile, is multiplied
    by its v. `FIXED_MAX`: m stays, and r counts, with `plain`, the row sums of the pending tile;
    otherwise these two mean nothing.
    """
    zeros = zero_product(BN)
    o_layout: gl.constexpr = acc[0].type.layout
    now, before, after = it % STAGES, pending % STAGES, (it + 1) % STAGES

    # issue both products: s = q·k(it) and acc += p(pending)·v(pending)
    if PINGPONG:
        bar_sync(TURN + C, 256)
    s_async = start_scores(q, ks, now, zeros)
    mbarrier.wait(v_full.index(before), (pending // STAGES) & 1)
    o_async = start_sum(p16, vs, before, acc)
    if PINGPONG:
        bar_arrive(TURN + (C + 1) % CONSUMERS, 256)
    if FIXED_MAX:
        # here, since it would only wait for q·k
        r += rounding_error(p16, plain, gl.sum(l, axis=1) * HEAVY)

    # softmax, while p·v is in flight
    s = warpgroup_mma_wait(PARTS, deps=(s_async,))
    bar_arrive(K_EMPTY + now, 128 * CONSUMERS + 32)
    # A wait loops, and ptxas moves no exponential past it. Here they stay behind the release of k:
    # with tiles of 128 keys 1 to 6% faster; with those of 64, or heads of 128, up to 9% slower
    EARLY: gl.constexpr = BN == 128 and not OVERLAP
    if EARLY:
        mbarrier.wait(k_full.index(after), ((it + 1) // STAGES) & 1, pred=more)
    AT_ONCE: gl.constexpr = FIXED_MAX and cap is not None and biases is None
    if cap is not None and not AT_ONCE:
        s = softcapped(s, cap)
    s = biased(s, biases, it, own, scale_log2)
    if masked:
        s = bounded(s, n0, first_i, last_i, inner, OWN_BOUNDS)
    if FIXED_MAX:
        if AT_ONCE:
            # in place if registers are few: with enough of them it takes 2% longer
            p = softcapped(s, cap, scale_log2, m, CONSUMERS == 3)
        else:
            p = gl.exp2(s * scale_log2 - m[:, None])
        plain = row_sums(p, ROWS, BN)
        l += plain
    else:
        p, m, alpha = softmax(s, m, scale_log2)
        l_scale = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))
        l = l * l_scale[:, None] + row_sums(p, ROWS, BN)
    p16 = gl.convert_layout(
        p.to(p16.dtype), gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    )
    if OVERLAP:  # so they run while the tensor cores multiply p·v
        mbarrier.wait(k_full.index(after), ((it + 1) // STAGES) & 1, pred=more)

    # acc
    done = finished(o_async + (p16,), 0)  # noqa: RUF005, Triton takes no star
    acc, p16 = done[:PARTS], done[PARTS]
    if not OVERLAP and not EARLY:
        mbarrier.wait(k_full.index(after), ((it + 1) // STAGES) & 1, pred=more)
    bar_arrive(V_EMPTY + before, 128 * CONSUMERS + 32)
    if not FIXED_MAX:
        acc = scaled(acc, alpha)
    return p16, m, l, r, plain, acc


@gluon.jit
def release_unseen(
    k_full, v_full, it, more,
    STAGES: gl.constexpr, PINGPONG: gl.constexpr, C: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Give back the it-th tile of keys, out of this consumer's sight."""
    now, after = it % STAGES, (it + 1) % STAGES
    if PINGPONG:
        bar_sync(TURN + C, 256)
        bar_arrive(TURN + (C + 1) % CONSUMERS, 256)
    bar_arrive(K_EMPTY + now, 128 * CONSUMERS + 32)
    mbarrier.wait(v_full.index(now), (it // STAGES) & 1)
    bar_arrive(V_EMPTY + now, 128 * CONSUMERS + 32)
    mbarrier.wait(k_full.index(after), ((it + 1) // STAGES) & 1, pred=more)


@gluon.jit
def consumer(
    out, lse, out_at,
    buffers, outs, loaded, queue, sink_slots, flags, schedule, scale_log2, cap,
    PARTS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PINGPONG: gl.constexpr, OVERLAP: gl.constexpr, OWN_BOUNDS: gl.constexpr, OUT_IN_Q: gl.constexpr,
    BY_DOCUMENT: gl.constexpr, HEAD: gl.constexpr,
    FIXED_MAX: gl.constexpr, SINKS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Compute out and lse of consumer C's 64 queries of each tile."""
    qs, ks, vs, biases = buffers
    q_full, q_empty, k_full, v_full = loaded
    first, last, _starts, stride_ib, Tq, Hq = schedule[:6]
    dtype: gl.constexpr = out[0].dtype
    BM: gl.constexpr = ROWS * CONSUMERS
    # may a consumer see none of a masked tile, or have no queries at all?
    UNEVEN: gl.constexpr = BM > BN
    zeros = zero_product(BN)
    s_layout: gl.constexpr = zeros.type.layout
    o_layout: gl.constexpr = zero_product(qs[0].shape[2]).type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    if PINGPONG and C == CONSUMERS - 1:
        bar_arrive(TURN, 256)  # the first turn is consumer 0's
    it = 0
    count = 0
    own_queries = at_index(qs, C)
    out_own = at_index(outs, C)
    t, row_head, m0, its_end, before, lo, full_lo, full_hi, masked, n = pop_all(
        queue, count, 4, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    )
    while t >= 0:
        # the tile of queries, and the keys that it sees
        b = row_head // Hq
        h = row_head % Hq
        tile_end, keys_before = (its_end, before) if BY_DOCUMENT else (Tq, 0)

        # this consumer's queries, if it has any, see keys lowest .. highest
        row0 = m0 + C * ROWS
        lowest = gl.load(first + b * stride_ib + gl.maximum(row0, 0), mask=row0 < tile_end, other=0)
        highest = gl.load(
            last + b * stride_ib + gl.minimum(row0 + ROWS, tile_end) - 1, mask=row0 >= 0, other=-1
        )
        # keys inner[0] .. inner[1] are seen by all of its queries
        inner = 0, 0
        if OWN_BOUNDS:
            its_last = gl.minimum(row0 + ROWS, tile_end) - 1
            inner = (
                gl.load(first + b * stride_ib + its_last, mask=row0 >= 0, other=0),
                gl.load(last + b * stride_ib + gl.maximum(row0, 0), mask=row0 < tile_end, other=-1),
            )
        i = row0 + gl.arange(0, ROWS, layout=s_rows)
        end = tile_end if not UNEVEN else gl.where(row0 >= 0, tile_end, row0)  # of its own queries
        first_i = gl.load(first + b * stride_ib + i, mask=i < end, other=0)
        last_i = gl.load(last + b * stride_ib + i, mask=i < end, other=-1)
        own = BIAS_SLOTS + count % TILE_SLOTS * CONSUMERS + C
        m = gl.full([ROWS], float("-inf"), gl.float32, layout=s_rows)
        acc = zero_parts(qs)
        mbarrier.wait(q_full.index(C), count & 1)
        if n > 0:
            mbarrier.wait(k_full.index(it % STAGES), (it // STAGES) & 1)
            passed = 0  # masked tiles before this consumer's first key
            if UNEVEN and not PINGPONG:
                passed = gl.maximum(gl.minimum((lowest + keys_before) // BN - lo, masked - 1), 0)
                for x in range(passed):
                    release_unseen(k_full, v_full, it + x, True, STAGES, PINGPONG, C, CONSUMERS)
            # prologue: the first tile's scores and softmax, with no p·v before them
            begin = it + passed
            if PINGPONG:
                bar_sync(TURN + C, 256)
            s_async = start_scores(own_queries, ks, begin % STAGES, zeros)
            if PINGPONG:
                bar_arrive(TURN + (C + 1) % CONSUMERS, 256)
            s = warpgroup_mma_wait(0, deps=(s_async,))
            bar_arrive(K_EMPTY + begin % STAGES, 128 * CONSUMERS + 32)
            if cap is not None:
                s = softcapped(s, cap)
            s = biased(s, biases, begin, own, scale_log2)
            n0 = gl.where(masked > 0, masked_tile(passed, lo, full_lo, full_hi), full_lo) * BN
            n0 -= keys_before
            s = bounded(s, n0, first_i, last_i, inner, OWN_BOUNDS)
            p, m, _ = softmax(s, m, scale_log2)
            l = row_sums(p, ROWS, BN)
            p16 = gl.convert_layout(p.to(dtype), p_layout)
            after = begin + 1
            mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1, pred=n > passed + 1)

            # masked tiles, then the others. A consumer passes over tiles out of its sight, and
            # holds the pending v meanwhile: for one tile less than there are stages, since the next
            # k comes after all v before it.
            steady = gl.maximum(masked, 1)
            pending = begin
            r = gl.zeros_like(l)
            plain = r  # so far the largest p was 1: rounding does not lean
            for STEADY in gl.static_range(2):
                if FIXED_MAX and STEADY:
                    # of a row that saw no tile so far, and will
                    m = gl.where((m == float("-inf")) & (steady < n), 0.0, m)
                    fixed_maximum = m
                for x in range(steady if STEADY else passed + 1, n if STEADY else steady):
                    n0 = masked_tile(x, lo, full_lo, full_hi) * BN - keys_before
                    seen = (n0 <= highest) & (n0 + BN > lowest) | (it + x - pending >= STAGES - 1)
                    if STEADY or not UNEVEN or seen:
                        p16, m, l, r, plain, acc = attend(
                            own_queries, p16, m, l, r, plain, acc,
                            ks, vs, k_full, v_full,
                            it + x, pending if UNEVEN else it + x - 1, x + 1 < n,
                            not STEADY, n0, first_i, last_i, inner, scale_log2, cap, biases, own,
                            BN, STAGES, PINGPONG, OVERLAP, OWN_BOUNDS, FIXED_MAX and STEADY,
                            C, CONSUMERS, PARTS,
                        )  # fmt: skip
                        pending = it + x
                    else:
                        release_unseen(
                            k_full, v_full, it + x, x + 1 < n, STAGES, PINGPONG, C, CONSUMERS
                        )
            if FIXED_MAX:
                m = fixed_maximum
            if not UNEVEN:
                pending = it + n - 1

            # the last p·v; meanwhile l, flags and lse
            if not OUT_IN_Q:
                mbarrier.arrive(q_empty.index(C), count=1)
            mbarrier.wait(v_full.index(pending % STAGES), (pending // STAGES) & 1)
            o_async = start_sum(p16, vs, pending % STAGES, acc)
            if FIXED_MAX:
                r += rounding_error(p16, plain, gl.sum(l, axis=1) * HEAVY)
            total = gl.convert_layout(gl.sum(l, axis=1), s_rows)
            if FIXED_MAX:
                in_range = (total > 1 / LARGEST) & (total < LARGEST)
                flag = (steady < n) & (i < end) & ~in_range
                flags.index(count % TILE_SLOTS * CONSUMERS + C).store(flag.to(gl.int32))
            total = gl.where(total == 0.0, 1.0, total)
            top, shrunk, joined = m, 1.0, 0.0  # a sink joins the sum of exponentials
            if SINKS:
                sink = own_sink(sink_slots, count, biases, own, s_layout) * LOG2E
                top = gl.maximum(gl.maximum(m, sink), -1e38)
                shrunk, joined = gl.exp2(m - top), gl.exp2(sink - top)
            lse_i = top * LN2 + gl.log(total * shrunk + joined)
            gl.store(lse + row_head.to(gl.int64) * Tq + i, lse_i, mask=i < end)
            acc = finished(o_async, 0)
            bar_arrive(V_EMPTY + pending % STAGES, 128 * CONSUMERS + 32)
            if FIXED_MAX:
                total = gl.convert_layout(gl.sum(l + r, axis=1), s_rows)
                total = gl.where(total == 0.0, 1.0, total)
            # 0 if a query sees no key, and its sink is -inf. A maximum would hide NaN
            total = total * shrunk + joined
            acc = scaled(acc, shrunk / gl.where(total == 0.0, 1.0, total))
        else:
            if not OUT_IN_Q:
                mbarrier.arrive(q_empty.index(C), count=1)
            lse_i = m
            if SINKS:
                lse_i = gl.maximum(m, own_sink(sink_slots, count, biases, own, s_layout))
            gl.store(lse + row_head.to(gl.int64) * Tq + i, lse_i, mask=i < end)

        # epilogue: out leaves by TMA while the next tile begins
        if FIXED_MAX:  # a flagged tile's first out is in memory before its second leaves
            SENT: gl.constexpr = "cp.async.bulk.wait_group 0;\n\tmov.u32 $0, 0;"
            gl.inline_asm_elementwise(SENT, "=r,r", [count], gl.int32, False, 1)
        tma.store_wait(0)
        for part in gl.static_range(PARTS):
            out_own[part].store(acc[part].to(dtype))
        fence_async_shared()
        if BY_DOCUMENT:
            if row0 + ROWS > tile_end:
                store_rows(out_at, acc[0], i, tile_end, b, h, Tq, Hq, HEAD)
            else:
                store_parts(out, out_own, b, row0, h)
        elif not UNEVEN or row0 >= 0:
            store_parts(out, out_own, b, row0, h)
        if OUT_IN_Q:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(C), count=1)
        it += n
        count += 1
        t, row_head, m0, its_end, before, lo, full_lo, full_hi, masked, n = pop_all(
            queue, count, 4, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["Tq", "Hq", "tiles", "heads", "l2_heads"])
def forward_kernel(
    references, bias, q, k, v, out, q1, k1, v1, out1,
    lse, counter, first, last, starts, sinks, out_at, stride_ib, scale_log2, cap,
    Tq, Hq, tiles, heads, l2_heads,
    shared: gl.constexpr, shared_kv: gl.constexpr, shared1: gl.constexpr, shared1_kv: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, D1: gl.constexpr, HEAD: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
    PINGPONG: gl.constexpr, OVERLAP: gl.constexpr, OWN_BOUNDS: gl.constexpr, OUT_IN_Q: gl.constexpr,
    BY_DOCUMENT: gl.constexpr, FIXED_MAX: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Compute out (B, Tq, Hq, D) contiguous and lse (B, Hq, Tq); the first ten are tensor maps.

    references, bias: of `of_bias`, or None. q1, k1, v1, out1: of the last D1 channels if those are
    a part of their own; else D1 is 0, and they are None. `counter`: 0.
    """
    # shared memory
    dtype: gl.constexpr = q.dtype
    D0: gl.constexpr = D - D1
    PARTS: gl.constexpr = 1 if D1 == 0 else 2
    qs = part_buffers(dtype, CONSUMERS, ROWS, D0, shared, D1, shared1)
    outs = qs
    if not OUT_IN_Q:
        outs = part_buffers(dtype, CONSUMERS, ROWS, D0, shared, D1, shared1)
    ks = part_buffers(dtype, STAGES, BN, D0, shared_kv, D1, shared1_kv)
    vs = part_buffers(dtype, STAGES, BN, D0, shared_kv, D1, shared1_kv)
    SLOTS: gl.constexpr = BIAS_SLOTS + TILE_SLOTS * CONSUMERS
    buffers = ForwardBuffers(
        qs, ks, vs,
        None if bias is None else gl.allocate_shared_memory(gl.float32, [SLOTS, 1, BN], ROW_LAYOUT),
    )  # fmt: skip
    q_full, q_empty = mbarriers(CONSUMERS, 1), mbarriers(CONSUMERS, 1)
    loaded = ForwardLoaded(q_full, q_empty, mbarriers(STAGES, 1), mbarriers(STAGES, 1))
    queue = tile_queue(CONSUMERS, 10)
    schedule = first, last, starts, stride_ib, Tq, Hq, tiles, heads, l2_heads
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    sink_slots = gl.allocate_shared_memory(gl.float32, [TILE_SLOTS, 1], one)
    flags = gl.allocate_shared_memory(gl.int32, [TILE_SLOTS * CONSUMERS, ROWS], one)

    # fmt: off
    # warps: consumers, then the producer. Triton takes functions and constants only as literals,
    # not from a variable; the c of a comprehension stays a constant.
    gl.warp_specialize([
        (consumer, (
            (out, out1)[:PARTS], lse, out_at,
            buffers, outs, loaded, queue, sink_slots, flags, schedule, scale_log2, cap,
            PARTS, BN, STAGES, CONSUMERS,
            PINGPONG, OVERLAP, OWN_BOUNDS, OUT_IN_Q, BY_DOCUMENT, HEAD, FIXED_MAX, SINKS, c,
        )) if c < CONSUMERS else (producer, (
            (q, q1)[:PARTS], (k, k1)[:PARTS], (v, v1)[:PARTS], bias, references,
            buffers, loaded, queue, sink_slots, counter, flags, sinks, schedule,
            GROUP, D, BN, STAGES, CONSUMERS, BY_DOCUMENT, FIXED_MAX, SINKS,
        ))
        for c in (0, 1, 2, 3)[: CONSUMERS + 1]
    ], [4, 4, 1][3 - CONSUMERS :], [REGISTERS, REGISTERS, 24][3 - CONSUMERS :])
    # fmt: on


def config_of(size: int, span: str, scores: Scores) -> ForwardConfig:
    """Return the config of heads of `size` channels; `span` as in `Intervals`."""
    # TMA reads biases from multiples of 16 bytes on, where few documents begin
    if span == "packed" and scores.key_bias is not None:
        span = "medium" if size == 64 else "long"
    return OTHER_CONFIGS.get((span, size), CONFIGS[size])


_launches: dict[Hashable, Relaunch] = {}


def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return out like q, contiguous, and lse (B, Hq, Tq) float32."""
    scale, softcap, sinks, key_bias = scores
    device = q.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return forward(q, k, v, intervals, scores)
    first, ends = intervals.first, (intervals.first, intervals.last, intervals.starts)
    q_at, k_at, v_at, *ends_at = [x.data_ptr() for x in (q, k, v, *ends)]
    sinks_at = 0 if sinks is None else sinks.data_ptr()
    config = config_of(hopper_size(q.shape[3]), intervals.span, scores)
    # everything that the choice of a compiled kernel depends on
    key = (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        *(q.dtype, k.dtype, v.dtype, device, scale, softcap),
        *(first.shape, first.stride(), *[at % 16 for at in ends_at], sinks is None, sinks_at % 16),
        *(config, key_bias is None),
    )
    kernel = _launches.get(key)
    if kernel is None or (q_at | k_at | v_at) % 16:
        return _first_forward(q, k, v, intervals, scores, config, key)
    B, Tq, Hq, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((B, Hq, Tq), dtype=torch.float32, device=q.device)
    stream = stream_of(device)
    zeros, start = unused_zeros(q.device, stream)
    biases = of_bias(scores, intervals, lse, config.BN, 1)
    lse_at, out_at, counter_at = lse.data_ptr(), out.data_ptr(), zeros.data_ptr() + 4 * start
    parts = len(kernel.likes) // 4  # of the channels; each has four tensor maps
    mapped = *[x.data_ptr() for x in biases], *((q_at, k_at, v_at, out_at) * parts)
    kernel(stream, mapped, lse_at, counter_at, *ends_at, sinks_at or lse_at, out_at)
    return out, lse


def _first_forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scores: Scores, *more: Any
) -> tuple[Tensor, Tensor]:
    """Compute a shape for the first time, or copy inputs that tensor maps cannot address."""
    addressed = addressable(q), addressable(k), addressable(v)
    if any(x is not y for x, y in zip(addressed, (q, k, v), strict=True)):
        return forward(*addressed, intervals, scores)
    config, key = more
    B, Tq, Hq, D = q.shape
    size, group = hopper_size(D), Hq // k.shape[2]
    tiles = triton.cdiv(Tq, 64 * config.consumers)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((B, Hq, Tq), dtype=torch.float32)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    # tensor maps of the first part of the channels, then of the second
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    width, rest = split(size)
    boxes = (q, 64), (k, config.BN), (v, config.BN), (out, 64)
    biases = of_bias(scores, intervals, lse, config.BN, 1)
    maps = [map_of_rows(x, B * Hq, config.BN) for x in biases] or [None, None]
    maps += [descriptor(x, n, width, dtype) for x, n in boxes]
    maps += [descriptor(x, n, rest, dtype) if rest else None for x, n in boxes]
    # arguments after maps and pointers
    scalars = (
        *(batch_stride(intervals.first), *exponents(scores)),
        *(Tq, Hq, tiles, B * Hq, heads_in_l2(k, B * Hq, group)),
    )
    constants = dict(
        shared=shared_layout((64, width), dtype),
        shared_kv=shared_layout((config.BN, width), dtype),
        shared1=shared_layout((64, rest), dtype) if rest else None,
        shared1_kv=shared_layout((config.BN, rest), dtype) if rest else None,
        GROUP=group,
        D=size,
        D1=rest,
        HEAD=D,
        SINKS=scores.sinks is not None,
    )
    # only bf16 has the range for a maximum that stays
    constants |= {name.upper(): value for name, value in config._asdict().items()}
    constants["FIXED_MAX"] &= dtype == gl.bfloat16
    programs = min(tiles * B * Hq, multiprocessors(q.device))
    ends = intervals.first, intervals.last, intervals.starts
    given = maps, (lse, counter, *ends, sinks_or(lse, scores), out), scalars, constants
    kernel = first_launch(forward_kernel, programs, *given, num_warps=4)
    assert kernel is not None, "Gluon has no interpreter"
    if len(_launches) >= LAUNCHES:  # rare, and simpler than an order of use
        _launches.clear()
    _launches[key] = kernel
    return out, lse
