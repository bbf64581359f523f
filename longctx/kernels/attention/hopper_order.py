"""The order in which the Hopper backward takes tiles of keys and, for each, tiles of queries; the
producer, which loads them in this order; and the mbarriers by which the consumers follow it.

The walk of a tile of keys is the sequence of tiles of queries that see it. Walks go up, to later
queries, or down.

Ordered, dq has the same bits every time: tiles of keys add to a part of dq one after another, each
when `semaphores` reports the one before it. If one last query sees all keys of a row, as in one
causal document, tiles go from the first key to the last and walk down from that query: the tiles of
a head follow one another at a distance of one step. In a row of several documents, or with a
window, that would make each wait for the one before. There they go from the last key to the first,
and walk up, each from a query of its own. Programs take tiles in this order, so a tile waits only
for running tiles.

Not ordered, walks go up, each from its own first query, and the reads of all programs at one time
are spread over all queries. For a group of heads of 128 channels that exceeds the L2 cache. There
every program walks down from the last query with its first tile, then up and down in turn. A
program that is early takes the longest tile left, and meets the others on the way: all read the
same queries at about the same time. Of 32 heads in groups of 4 at 16,384 tokens, 2.7 instead of
14.7 GB went through HBM. Groups in documents, and larger ones of 64 channels, always walk down.

With a window, neighbours among the tiles of keys see nearly the same queries, one a step after the
other. Were heads of a group taken in turn, what all programs read in between would exceed the L2
cache: walks take one head after another. 4/1 heads of 256, window 512: 1.08 for 1.89 ms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from longctx.kernels.attention.hopper_primitives import (
    bar_sync,
    load_parts,
    mbarriers,
    push,
    tile_queue,
    tma_load,
)
from longctx.kernels.attention.portable import scheduled_tile, visible_tiles

Q_DO_EMPTY = gl.constexpr(13)  # named barrier 13 + tile & 1: q and do have been read
# Rows of a tile of keys: biases, then zeros to which the owner adds the gradient, a row for each of
# four warps, or one. An addition drops its line from L1, so biases have lines of their own
BIAS_ROWS = gl.constexpr(5)
LAST_TURN = gl.constexpr(1 << 30)  # of the first keys, if tiles go from the last ones


# How walks go: up, up and down in turn, down; up for one head of a group after another
UP, IN_TURN, DOWN, BY_HEAD = (gl.constexpr(i) for i in (1, 2, 3, 4))


def directions(head_dim: int, group: int, ordered: bool, span: str) -> int:
    """Return how walks go, see above. In turn takes registers, at 64 channels too many."""
    if group > 1 and not ordered and span in ("short", "medium", "window"):
        return BY_HEAD.value
    if ordered or (group > 1 and head_dim > 64 and span != "packed"):
        return IN_TURN.value
    return DOWN.value if group > (4 if head_dim == 64 else 1) else UP.value


class TileSchedule(NamedTuple):
    """Intervals of the queries that see each key, lengths, and the tiles of `scheduled_tile`."""

    qfirst: Any
    qlast: Any
    stride_ib: Any
    Tq: Any
    Tk: Any
    Hq: Any
    tiles: Any
    heads: Any
    l2_heads: Any


@gluon.jit
def key_tile(
    t, schedule, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ORDERED: gl.constexpr
):
    """Return tile t of the schedule: row b, kv_head, first key n0, and `down`; first and number of
    the tiles of queries that see its keys; qfirst and qlast of the row.

    Ordered, rows whose tiles walk up begin with their last keys; all others begin with the first
    keys, since their walks are the longest. `down` means something if walks go IN_TURN.
    """
    qfirst, qlast, stride_ib, _, Tk, Hq, tiles, heads, l2_heads = schedule
    Hkv = Hq // GROUP
    rank, row_head = scheduled_tile(t, tiles, heads, l2_heads)
    b = row_head // Hkv
    if ORDERED:
        down = gl.load(qlast + b * stride_ib) == gl.load(qlast + b * stride_ib + Tk - 1)
        rank = gl.where(down, rank, tiles - 1 - rank)
    else:
        down = (t // gl.num_programs(0)) % 2 == 0
    kv_head, n0 = row_head % Hkv, rank * BN
    qfirst += b * stride_ib
    qlast += b * stride_ib
    lo, full_lo, full_hi, masked = visible_tiles(qfirst, qlast, n0, gl.minimum(n0 + BN, Tk), BM)
    return b, kv_head, n0, down, lo, masked + full_hi - full_lo, qfirst, qlast


@gluon.jit
def query_tile(x, lo, n, down, GROUP: gl.constexpr, DIRECTIONS: gl.constexpr):
    """Return the tile of queries of step x of a walk, and which head of the group takes it."""
    m, head = lo + x // GROUP, x % GROUP
    if DIRECTIONS == IN_TURN:
        m = gl.where(down, lo + n - 1 - x // GROUP, m)
    elif DIRECTIONS == DOWN:
        m = lo + n - 1 - x // GROUP
    elif DIRECTIONS == BY_HEAD:
        m, head = lo + x % n, x // n
    return m, head


@gluon.jit
def predecessor(qfirst, qlast, n0, Tk, down, BN: gl.constexpr):
    """Return the queries that see the preceding tile of keys, of the one from n0 on, and its turn.

    Tiles add to dq in the order of their turns.
    """
    from_query = gl.where(down, 0, gl.load(qfirst + n0 + BN, mask=n0 + BN < Tk, other=2147483647))
    to_query = gl.where(down, gl.load(qlast + n0 - 1, mask=n0 > 0, other=-1), 2147483647)
    return from_query, to_query, gl.where(down, n0 // BN, LAST_TURN - 1 - n0 // BN)


@gluon.jit
def release(semaphore, before, AFTER: gl.constexpr, HOW: gl.constexpr):
    """Report that the tile of keys with the turn after `before` has added its part of dq.

    AFTER: PTX to wait until the sums are in memory. Each warp reports once. A late report must not
    undo the next tile's, hence the maximum.
    """
    gl.inline_asm_elementwise(
        f"{{\n\t{AFTER}\n\t.reg .pred elected;\n\telect.sync _|elected, 0xffffffff;\n\t"
        f"@elected red.release.gpu.global.{HOW}.u32 [$1], $2;\n\tmov.u32 $0, 0;\n\t}}",
        "=r,l,r",
        [semaphore.to(gl.int64, bitcast=True), before + 1],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def release_sent(semaphore, before):
    """Report as `release` does, after a warp's sums by TMA.

    It waits until all that was sent is in memory; that its source was read is not enough.
    """
    release(semaphore, before, "cp.async.bulk.wait_group 0;\n\tbar.warp.sync -1;", "max")


@gluon.jit
def release_added(semaphore, before, BARRIER: gl.constexpr):
    """Report as `release` does, after a warpgroup's sums from registers, at a named barrier."""
    # a name of its own: Triton 3.6 takes no f-string as an argument
    AFTER: gl.constexpr = f"fence.acq_rel.gpu;\n\tbar.sync {BARRIER}, 128;"
    release(semaphore, before, AFTER, "max")


@gluon.jit
def zero_ahead(
    counter, semaphores, head, rank, schedule,
    BM: gl.constexpr, D: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Zero a writer's part of the sums of dq of a head in the next group of heads, and wait until
    those of `head` are zero. Every tile of keys has such a part, half of it for each writer.
    """
    _, _, _, Tq, _, _, tiles, heads, l2_heads = schedule
    HALF: gl.constexpr = BM * D // 2
    later, blocks = head + l2_heads, gl.cdiv(Tq, BM)
    each = gl.cdiv(blocks, tiles)
    if later < heads:
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
        zeros = gl.zeros([1024], gl.int32, layout=layout)
        sums = counter + gl.cdiv(4 + heads, 64) * 64 + gl.arange(0, 1024, layout=layout)
        first = later.to(gl.int64) * blocks
        for block in range(rank * each, gl.minimum((rank + 1) * each, blocks)):
            for x in gl.static_range(HALF // 1024):
                gl.store(sums + ((first + block) * 2 + C) * HALF + x * 1024, zeros)
        release(semaphores + later, 0, "fence.proxy.async;\n\tbar.warp.sync -1;", "add")
    if head >= l2_heads:
        while gl.load(semaphores + head, volatile=True) < 2 * tiles:
            pass


@gluon.jit
def consumer_walk(
    t, schedule, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr,
    C: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the walk of consumer C over its KEYS keys of tile t.

    First query m0 of the first step, n tiles of queries, `down`; the first and last query that sees
    each key; the first and last query that sees all keys.
    """
    Tk = schedule.Tk
    _, _, n0, down, lo, n, qfirst, qlast = key_tile(t, schedule, GROUP, BM, BN, ORDERED)
    start = n0 + C * KEYS
    j = start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    qfirst_j = gl.load(qfirst + j, mask=j < Tk, other=0)
    qlast_j = gl.load(qlast + j, mask=j < Tk, other=-1)
    last_first = gl.load(qfirst + gl.minimum(start + KEYS, Tk) - 1)
    # no query sees keys past the end
    first_last = gl.load(qlast + start, mask=start + KEYS <= Tk, other=-1)
    if DIRECTIONS == IN_TURN:
        lo = gl.where(down, lo + n - 1, lo)
    elif DIRECTIONS == DOWN:
        lo += n - 1
    return lo * BM, n, down, qfirst_j, qlast_j, last_first, first_last


@gluon.jit
def bias_of_keys(
    bias, t, schedule,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Return where tile t begins in `of_bias`, and how far heads are apart; 0 without a bias."""
    if bias is None:
        return 0, 0
    else:
        b, kv_head, n0, _, _, _, _, _ = key_tile(t, schedule, GROUP, BM, BN, ORDERED)
        stride = schedule.tiles * BN * BIAS_ROWS
        head = (b * schedule.Hq + kv_head * GROUP).to(gl.int64)
        return bias + head * stride + n0 * BIAS_ROWS, stride


class Buffers(NamedTuple):
    """Shared memory that the producer loads; qs, ks, vs, dos are tuples of the channels' parts.
    With a key bias, two more of `lses` hold that of each query's last key.
    """

    qs: Any
    ks: Any
    vs: Any
    dos: Any
    lses: Any
    deltas: Any


class Loaded(NamedTuple):
    """mbarriers of the producer's loads, one for each slot: written (full), and for k and v also
    read (empty).
    """

    q_full: Any
    do_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


@gluon.jit
def barriers(READERS: gl.constexpr, K_SLOTS: gl.constexpr = 1, V_SLOTS: gl.constexpr = 1):
    """Return the mbarriers of a backward kernel, initialised, and its tile queue of READERS.

    q and do have two slots. A slot of k or v is empty after two arrivals: of both consumers, or of
    both writers if dv leaves from there.
    """
    q_full, do_full = mbarriers(2, 1), mbarriers(2, 1)
    k_full, k_empty = mbarriers(K_SLOTS, 1), mbarriers(K_SLOTS, 2)
    v_full, v_empty = mbarriers(V_SLOTS, 1), mbarriers(V_SLOTS, 2)
    return Loaded(q_full, do_full, k_full, k_empty, v_full, v_empty), tile_queue(READERS)


@gluon.jit
def wait_keys(full, count):
    """Wait for the k or v of the count-th tile."""
    SLOTS: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(count % SLOTS), (count // SLOTS) & 1)


@gluon.jit
def load_keys(x, xs, full, empty, count, b, n0, h, D: gl.constexpr):
    """Load a tile of k or v, in one box or one for each consumer, once its slot is empty.

    More buffers than maps: of the tile's last box, in the only slot.
    """
    SLOTS: gl.constexpr = full.shape[0]
    BOXES: gl.constexpr = xs[0].shape[0] // SLOTS
    N: gl.constexpr = xs[0].shape[1]
    PARTS: gl.constexpr = min(len(x), len(xs))
    slot = count % SLOTS
    mbarrier.wait(empty.index(slot), ((count // SLOTS) & 1) ^ 1)
    mbarrier.expect(full.index(slot), (BOXES + (len(xs) > PARTS)) * N * D * 2)
    for i in gl.static_range(BOXES):
        load_parts(x, xs[:PARTS], slot * BOXES + i, full.index(slot), b, n0 + i * N, h)
    if len(xs) > PARTS:
        load_parts(x, xs[PARTS:], 0, full.index(slot), b, n0 + BOXES * N, h)


@gluon.jit
def producer(
    q, k, v, do, lse2, delta, references,
    buffers, loaded, queue,
    counter, schedule,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr, ZEROES: gl.constexpr = False,
):  # fmt: skip
    """Hand out tiles of keys, and load them and the queries of their walks."""
    qs, ks, vs, dos, lses, deltas = buffers
    q_full, do_full, k_full, k_empty, v_full, v_empty = loaded
    Hq = schedule.Hq
    it = 0
    count = 0
    t = gl.program_id(0)
    if ORDERED or ZEROES:  # a program that does not run yet must own no tile that others wait for
        t = gl.atomic_add(counter, 1)
    while t < schedule.tiles * schedule.heads:
        push(queue, count, (t,))
        b, kv_head, n0, down, lo, n, _, _ = key_tile(t, schedule, GROUP, BM, BN, ORDERED)
        # the walk: q and do at each step, k and v behind the first
        for x in range(n * GROUP):
            m, head = query_tile(x, lo, n, down, GROUP, DIRECTIONS)
            h = kv_head * GROUP + head
            m0 = m * BM
            s = it & 1
            if it >= 2:
                bar_sync(Q_DO_EMPTY + s, 288)
            mbarrier.expect(q_full.index(s), BM * D * 2 + BM * 2 * lses.shape[0])
            load_parts(q, qs, s, q_full.index(s), b, m0, h)
            tma_load(lse2, [b * Hq + h, m0], q_full.index(s), lses.index(s))
            if references is not None:
                tma_load(references, [b * Hq + h, m0], q_full.index(s), lses.index(2 + s))
            if x == 0:
                load_keys(k, ks, k_full, k_empty, count, b, n0, kv_head, D)
            mbarrier.expect(do_full.index(s), BM * D * 2 + BM * 4)
            load_parts(do, dos, s, do_full.index(s), b, m0, h)
            tma_load(delta, [b * Hq + h, m0], do_full.index(s), deltas.index(s))
            if x == 0:
                load_keys(v, vs, v_full, v_empty, count, b, n0, kv_head, D)
            it += 1
        if n == 0:  # consumers wait for k and v even of keys that nobody sees
            load_keys(k, ks, k_full, k_empty, count, b, n0, kv_head, D)
            load_keys(v, vs, v_full, v_empty, count, b, n0, kv_head, D)
        # the next tile: the first num_programs were handed out by program
        t = gl.atomic_add(counter, 1)
        if not (ORDERED or ZEROES):
            t += gl.num_programs(0)
        count += 1
    push(queue, count, (-1,))
    # meet the last arrivals, for which no load waits
    for x in range(gl.maximum(it - 2, 0), it):
        bar_sync(Q_DO_EMPTY + (x & 1), 288)
