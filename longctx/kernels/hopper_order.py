"""In which order the backward for Hopper takes tiles of keys, and walks from each over the queries;
ordered, whose turn it is to add to dq.

Ordered, the tiles that add to the same part of dq do so one after another, each when `turns` says
that the one before it is done. Where all keys of a row are seen by the same last query, as in one
causal document, they go down, from the first key to the last, and walk from that query down: the
tiles of a head follow one another at a distance of one step. In a row of several documents, or with
a window, that would make each wait for the one before; there they go from the last key to the
first, and walk up, each from a query of its own. Programs take the tiles in the order of turns, so
a tile waits only for tiles that run already.

Where nothing is ordered, walks go up, each from its own first query, and what the programs read at
one time is spread over all queries. For a group of heads of 128 channels that is more than the L2
cache holds. There every program walks down from the last query with its first tile, and then up and
down by turns: one that comes to its end early has the longest of the tiles that are left before it,
and meets the others on the way, so that all read the same queries at about the same time. Of 32
heads in groups of 4 at 16,384 tokens, 2.7 instead of 14.7 GB went through HBM.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longctx.kernels.walk import place, walk


@gluon.jit
def owned_keys(
    t, tiles, qlast, stride_ib, Tk, Hkv, heads, together, BN: gl.constexpr, ORDERED: gl.constexpr
):
    """Tile t of the schedule: row b, key-value head hk, first key n0, and `down`: if there are two
    ways, its walk goes down.

    Ordered, rows whose tiles do not go down begin with their last keys; all others with their
    first, whose walks are the longest.
    """
    rank, bh = place(t, tiles, heads, together)
    b = bh // Hkv
    if ORDERED:
        down = gl.load(qlast + b * stride_ib) == gl.load(qlast + b * stride_ib + Tk - 1)
        rank = gl.where(down, rank, tiles - 1 - rank)
    else:
        down = (t // gl.num_programs(0)) % 2 == 0
    return b, bh % Hkv, rank * BN, down


@gluon.jit
def queries(qfirst, qlast, n0, Tk, BM: gl.constexpr, BN: gl.constexpr):
    """The n tiles of queries from lo on that see the keys from n0 on."""
    lo, full_lo, full_hi, masked = walk(qfirst, qlast, n0, gl.minimum(n0 + BN, Tk), BM)
    return lo, masked + full_hi - full_lo


@gluon.jit
def query_tile(x, lo, n, down, GROUP: gl.constexpr, WAYS: gl.constexpr):
    """The tile of queries of the x-th step of a walk, which takes all heads of the group side by
    side; of two WAYS, maybe `down`.
    """
    m = lo + x // GROUP
    if WAYS == 2:
        m = gl.where(down, lo + n - 1 - x // GROUP, m)
    return m


@gluon.jit
def turn_before(qfirst, qlast, n0, Tk, down, BN: gl.constexpr):
    """The queries that the tile of keys sees whose turn is before that of the one from n0 on, and
    what `turns` says after it.
    """
    from_query = gl.where(down, 0, gl.load(qfirst + n0 + BN, mask=n0 + BN < Tk, other=2147483647))
    to_query = gl.where(down, gl.load(qlast + n0 - 1, mask=n0 > 0, other=-1), 2147483647)
    return from_query, to_query, n0 // BN + gl.where(down, 0, 2)


@gluon.jit
def pass_turn(done, n0, BN: gl.constexpr):
    """Say that this tile of keys has added its part, when all that was sent is there; that its
    source was read is not enough.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0;\n\tbar.warp.sync -1;\n\tst.release.gpu.global.u32 [$1], $2;\n\tmov.u32 $0, 0;",
        "=r,l,r", [done.to(gl.int64, bitcast=True), n0 // BN + 1], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def walk_of(
    t, qfirst, qlast, stride_ib, tiles, Tk, Hkv, heads, together,
    BM: gl.constexpr, BN: gl.constexpr, ORDERED: gl.constexpr, WAYS: gl.constexpr,
    C: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """What consumer C, which has KEYS keys, needs for the walk of tile t: the first query m0 of its
    first step, n tiles of queries, `down`; and of its keys the first and last query that sees each,
    the first that sees all of them, and the last.
    """
    b, _, n0, down = owned_keys(t, tiles, qlast, stride_ib, Tk, Hkv, heads, together, BN, ORDERED)
    qfirst += b * stride_ib
    qlast += b * stride_ib
    lo, n = queries(qfirst, qlast, n0, Tk, BM, BN)
    start = n0 + C * KEYS
    j = start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    qfirst_j = gl.load(qfirst + j, mask=j < Tk, other=0)
    qlast_j = gl.load(qlast + j, mask=j < Tk, other=-1)
    last_first = gl.load(qfirst + gl.minimum(start + KEYS, Tk) - 1)
    first_last = gl.load(
        qlast + start, mask=start + KEYS <= Tk, other=-1
    )  # none sees those past the end
    m0 = (gl.where(down, lo + n - 1, lo) if WAYS == 2 else lo) * BM
    return m0, n, down, qfirst_j, qlast_j, last_first, first_last
