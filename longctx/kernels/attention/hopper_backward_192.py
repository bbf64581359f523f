"""FlashAttention backward for Hopper in Gluon, for heads of 192 channels.

Equations, letters and masks are those of portable.py; the launch is in hopper_backward.py, the
producer in hopper_order.py.

Every step loads a tile of q and do from L2 and adds a tile of dq there, for all keys of a program:
the more keys, the less it waits for L2. 96 are the most whose dk and dv fit into registers; compare
FlashAttention-3 (arXiv 2407.08608), whose tile is the same. Consumer 0 owns dv, consumer 1 dk. A
step of each, beside the other's:

    consumer 0                               consumer 1
    p = exp(s - lse) to shared memory        ds = p (dp - delta) to shared memory
    dv += p·do; release q and do             dk += ds·q; release q and do
    128 channels of dq of the step before    64 channels of dq
    s of the next tile of queries            dp of the next tile of queries

Sides of tensors are powers of two, so the keys come in two pieces, of 64 and of 32, and the
channels in three parts of 64. dk and dv are transposed: their rows, of which a product has 64, are
channels. Products read both operands from shared memory, which at columns of 64 and 32 it can only
just feed; loads and stores of p and ds wait for it.

p of a step is in its slot until p of two steps later is written: consumer 1 has used it when it
reports ds of this step, for which consumer 0 waits one step later. ds is there until consumer 0 has
formed dq of it, which is before it writes the p of two steps later.

Buffers in shared memory, 217 KiB: qs, dos, lses, deltas, pss, dss (two slots, by step), ks, vs. qs,
dos, ks, vs have three parts, of channels; pss, dss two, of keys. dv and dk leave from the places of
v and k.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longctx.kernels.attention.hopper_backward_256 import add_tile
from longctx.kernels.attention.hopper_order import (
    Q_DO_EMPTY,
    Buffers,
    barriers,
    key_tile,
    predecessor,
    producer,
    query_tile,
    query_tiles,
    release_added,
)
from longctx.kernels.attention.hopper_primitives import (
    bar_arrive,
    bar_sync,
    mask_scores,
    pop,
    reinterpret,
    store_part,
    zero_product,
)

N = gl.constexpr(64)  # queries of a tile, channels of a part
KEYS = gl.constexpr(96)  # of a tile
BOX = gl.constexpr(32)  # rows of the tensor maps of keys
# Of the hardware's 16 named barriers Triton takes 0 to 3 for three partitions.
P_FULL = gl.constexpr(5)  # 5 + tile & 1
DS_FULL = gl.constexpr(7)  # 7 + tile & 1
OWN = gl.constexpr(9)  # 9 + consumer: its warps have written p or ds, or added dq
WALKED = gl.constexpr(11)  # k and v have been read


@gluon.jit
def pieces(xs, i, zero, shared: gl.constexpr):
    """Return both pieces of keys, (64, 64) and (32, 64), of part i of k or v, three boxes.

    `zero` is 0, which the compiler does not know: else it would keep descriptors in registers.
    """
    first = reinterpret(xs[i], xs[i].dtype, [1, 2 * BOX, N], shared).index(zero)
    return first, xs[i].index(2 + zero)


@gluon.jit
def start_scores(xs, stage, ys, zero, shared: gl.constexpr, PIECE: gl.constexpr):
    """Issue x·yᵀ of a piece of the keys in y: a product for each part of the channels."""
    s = zero_product(N if PIECE == 0 else BOX)
    for i in gl.static_range(3):
        y = pieces(ys, i, zero, shared)[PIECE]
        s = warpgroup_mma(xs[i].index(stage), y.permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def start_sums(sums, xs, ps, stage):
    """Issue sums += xᵀ·p, of three parts of the channels and both pieces of the keys."""
    p0, p1 = ps[0].index(stage), ps[1].index(stage)
    x0, x1, x2 = xs[0].index(stage), xs[1].index(stage), xs[2].index(stage)
    return (
        warpgroup_mma(x0.permute((1, 0)), p0, sums[0], is_async=True),
        warpgroup_mma(x0.permute((1, 0)), p1, sums[1], is_async=True),
        warpgroup_mma(x1.permute((1, 0)), p0, sums[2], is_async=True),
        warpgroup_mma(x1.permute((1, 0)), p1, sums[3], is_async=True),
        warpgroup_mma(x2.permute((1, 0)), p0, sums[4], is_async=True),
        warpgroup_mma(x2.permute((1, 0)), p1, sums[5], is_async=True),
    )


@gluon.jit
def finish_sums(x, OUTSTANDING: gl.constexpr):
    """Return x, of `start_sums`, once no more than OUTSTANDING later products run."""
    return warpgroup_mma_wait(OUTSTANDING, deps=(x[0], x[1], x[2], x[3], x[4], x[5]))


@gluon.jit
def start_dq(dss, stage, ks, i, dq, zero, shared: gl.constexpr):
    """Issue ds·k for part i of the channels, a product for each piece of the keys.

    It takes the registers of dq and drops their values. With a plain use_acc=False the compiler
    would take others, and spill; it does not know that `zero` is 0.
    """
    k0, k1 = pieces(ks, i, zero, shared)
    dq = warpgroup_mma(dss[0].index(stage), k0, dq, use_acc=zero > 0, is_async=True)
    return warpgroup_mma(dss[1].index(stage), k1, dq, is_async=True)


@gluon.jit
def store_p(
    s, lse, p,
    n0, m0, first, last, row, Tq, before, after, scale_log2,
):  # fmt: skip
    """p = exp(s - lse), of a piece of the keys, from n0 on.

    `before`, `after`: some query may not see the first keys of the tile, or the last ones.
    """
    layout: gl.constexpr = s.type.layout
    if before | after:
        i = m0 + gl.arange(0, N, layout=gl.SliceLayout(1, layout))
        # queries past the end see no key
        first_i = gl.load(first + row + i, mask=i < Tq, other=2147483647)
        last_i = gl.load(last + row + i, mask=i < Tq, other=-1)
        s = mask_scores(s, n0, first_i, last_i, before, after)
    x = gl.exp2(s * scale_log2 - lse.permute((1, 0)).load(layout))
    p.store(x.to(p.dtype))


@gluon.jit
def store_ds(dp, delta, p, ds):
    """ds = p (dp - delta), of a piece of the keys."""
    layout: gl.constexpr = dp.type.layout
    x = p.load(layout).to(gl.float32) * (dp - delta.permute((1, 0)).load(layout))
    ds.store(x.to(ds.dtype))


@gluon.jit
def scores_step(
    s, dv,
    sums, semaphore, wait, before, ready,
    ks, qs, dos, lses, pss, dss,
    first, last, row, m0, n0, Tq, keys_before, keys_after, scale_log2,
    q_full, do_full,
    it, zero, more,
    shared: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Take one tile of queries in consumer 0, from its s: return the next tile's s, and dv.

    dq is that of the tile before, if `ready`.
    """
    now, after = it & 1, (it + 1) & 1
    # p = exp(s - lse)
    for i in gl.static_range(2):
        store_p(
            s[i], lses.index(now), pss[i].index(now),
            n0 + i * N, m0, first, last, row, Tq, keys_before, keys_after, scale_log2,
        )  # fmt: skip
    fence_async_shared()
    bar_arrive(P_FULL + now, 256)
    bar_sync(OWN, 128)

    # dv += p·do, dq of the tile before
    mbarrier.wait(do_full.index(now), (it >> 1) & 1)
    dv = start_sums(dv, dos, pss, now)
    if ready:
        bar_sync(DS_FULL + after, 256)
    dq_async = start_dq(dss, after, ks, 0, zero_product(N), it & zero, shared)
    dv = finish_sums(dv, 2)
    bar_arrive(Q_DO_EMPTY + now, 288)
    dq = warpgroup_mma_wait(0, deps=(dq_async,))
    add_tile(dq, sums, semaphore, wait, before, ready, 0, ORDERED)
    dq_async = start_dq(dss, after, ks, 1, dq, it & zero, shared)

    # s of the next tile
    mbarrier.wait(q_full.index(after), ((it + 1) >> 1) & 1, pred=more)
    s1 = start_scores(qs, after, ks, it & zero, shared, 1)
    dq = warpgroup_mma_wait(3, deps=(dq_async,))
    add_tile(dq, sums, semaphore, wait, before, ready, N, ORDERED)
    if ORDERED:  # noqa: SIM102, the first is known when compiling
        if ready:
            release_added(semaphore, before, OWN)
    s0 = start_scores(qs, after, ks, it & zero, shared, 0)
    s = warpgroup_mma_wait(0, deps=(s0, s1))
    return s, dv


@gluon.jit
def gradient_step(
    dp, dk,
    sums, semaphore, wait, before,
    ks, vs, qs, dos, deltas, pss, dss,
    q_full, do_full,
    it, zero, more,
    shared: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Take one tile of queries in consumer 1, from its dp: return the next tile's dp, and dk."""
    now, after = it & 1, (it + 1) & 1
    # ds = p (dp - delta)
    bar_sync(P_FULL + now, 256)
    for i in gl.static_range(2):
        store_ds(dp[i], deltas.index(now), pss[i].index(now), dss[i].index(now))
    fence_async_shared()
    bar_arrive(DS_FULL + now, 256)
    bar_sync(OWN + 1, 128)

    # dk += ds·q, dq
    mbarrier.wait(q_full.index(now), (it >> 1) & 1)
    dk = start_sums(dk, qs, dss, now)
    dq_async = start_dq(dss, now, ks, 2, zero_product(N), it & zero, shared)
    dk = finish_sums(dk, 2)
    bar_arrive(Q_DO_EMPTY + now, 288)
    dq = warpgroup_mma_wait(0, deps=(dq_async,))
    add_tile(dq, sums, semaphore, wait, before, True, 0, ORDERED)
    if ORDERED:
        release_added(semaphore, before, OWN + 1)

    # dp of the next tile
    mbarrier.wait(do_full.index(after), ((it + 1) >> 1) & 1, pred=more)
    dp1 = start_scores(dos, after, vs, it & zero, shared, 1)
    dp0 = start_scores(dos, after, vs, it & zero, shared, 0)
    dp = warpgroup_mma_wait(0, deps=(dp0, dp1))
    return dp, dk


@gluon.jit
def store_tile(x_map, xs, x, scale, b, n0, h, shared: gl.constexpr):
    """Store dk or dv, times `scale`, from the places of k or v."""
    for i in gl.static_range(3):
        first, last = pieces(xs, i, 0, shared)
        first.permute((1, 0)).store((x[2 * i] * scale).to(first.dtype))
        last.permute((1, 0)).store((x[2 * i + 1] * scale).to(last.dtype))
    fence_async_shared()
    for i in gl.static_range(3):
        for j in gl.static_range(3):
            store_part(x_map, xs[i].index(j), b, n0 + j * BOX, h, i * N)
    tma.store_wait(0)


@gluon.jit
def consumer(
    sums, out_map,
    buffers, pss, dss,
    loaded, queue,
    semaphores, first, last, qfirst, qlast, stride_first, stride_ib, scale, scale_log2,
    Tq, Tk, Hq, tiles, heads, l2_heads, zero,
    shared: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C: dv or dk of each tile, and its channels of dq at every step."""
    qs, ks, vs, dos, lses, deltas = buffers
    q_full, do_full, k_full, k_empty, v_full, v_empty = loaded
    it = 0
    count = 0
    t = pop(queue, count, 4)
    while t >= 0:
        # the tile of keys, the queries that see it
        b, hk, n0, down = key_tile(
            t, tiles, qlast, stride_ib, Tk, Hq // GROUP, heads, l2_heads, KEYS, ORDERED
        )
        qfirst_b = qfirst + b * stride_ib
        qlast_b = qlast + b * stride_ib
        lo, n = query_tiles(qfirst_b, qlast_b, n0, Tk, N, KEYS)
        from_query, to_query, before = predecessor(qfirst_b, qlast_b, n0, Tk, down, KEYS)
        # queries from last_first to first_last see all keys; none sees keys past the end
        last_first = gl.load(qfirst_b + gl.minimum(n0 + KEYS, Tk) - 1)
        first_last = gl.load(qlast_b + n0)
        last_first = gl.where(n0 + KEYS > Tk, 2147483647, last_first)

        out = (
            zero_product(N), zero_product(BOX), zero_product(N),
            zero_product(BOX), zero_product(N), zero_product(BOX),
        )  # fmt: skip
        mbarrier.wait(k_full, count & 1)
        mbarrier.wait(v_full, count & 1)
        if n > 0:
            # prologue: s or dp of the first tile of queries
            if C == 0:
                mbarrier.wait(q_full.index(it & 1), (it >> 1) & 1)
                s0 = start_scores(qs, it & 1, ks, it & zero, shared, 0)
                s1 = start_scores(qs, it & 1, ks, it & zero, shared, 1)
            else:
                mbarrier.wait(do_full.index(it & 1), (it >> 1) & 1)
                s0 = start_scores(dos, it & 1, vs, it & zero, shared, 0)
                s1 = start_scores(dos, it & 1, vs, it & zero, shared, 1)
            s = warpgroup_mma_wait(0, deps=(s0, s1))

            # steady state
            first_tile = (b * Hq + hk * GROUP) * gl.cdiv(Tq, N)
            tile = first_tile
            wait = False
            for x in range(n * GROUP):
                tile_before, wait_before = tile, wait
                m = query_tile(x, lo, n, down, GROUP, DIRECTIONS)
                tile = first_tile + (x % GROUP) * gl.cdiv(Tq, N) + m
                wait = ((m + 1) * N > from_query) & (m * N <= to_query)
                if C == 0:
                    s, out = scores_step(
                        s, out,
                        sums + tile_before.to(gl.int64) * (N * D), semaphores + 2 * tile_before,
                        wait_before, before, x > 0,
                        ks, qs, dos, lses, pss, dss,
                        first, last, b * stride_first, m * N, n0, Tq,
                        m * N + N - 1 > first_last, m * N < last_first, scale_log2,
                        q_full, do_full,
                        it, zero, x + 1 < n * GROUP,
                        shared, ORDERED,
                    )  # fmt: skip
                else:
                    s, out = gradient_step(
                        s, out,
                        sums + tile.to(gl.int64) * (N * D) + 2 * N * N, semaphores + 2 * tile + 1,
                        wait, before,
                        ks, vs, qs, dos, deltas, pss, dss,
                        q_full, do_full,
                        it, zero, x + 1 < n * GROUP,
                        shared, ORDERED,
                    )  # fmt: skip
                it += 1
            if C == 0:
                # dq of the last tile
                at = sums + tile.to(gl.int64) * (N * D)
                semaphore = semaphores + 2 * tile
                slot = (it + 1) & 1
                bar_sync(DS_FULL + slot, 256)
                dq_async = start_dq(dss, slot, ks, 0, zero_product(N), it & zero, shared)
                dq = warpgroup_mma_wait(0, deps=(dq_async,))
                add_tile(dq, at, semaphore, wait, before, True, 0, ORDERED)
                dq_async = start_dq(dss, slot, ks, 1, dq, it & zero, shared)
                dq = warpgroup_mma_wait(0, deps=(dq_async,))
                add_tile(dq, at, semaphore, wait, before, True, N, ORDERED)
                if ORDERED:
                    release_added(semaphore, before, OWN)

        # epilogue: dv and dk leave from the places of v and k, once both consumers have read them
        bar_sync(WALKED, 256)
        if C == 0:
            store_tile(out_map, vs, out, 1.0, b, n0, hk, shared)
        else:
            store_tile(out_map, ks, out, scale, b, n0, hk, shared)
        mbarrier.arrive(k_empty, count=1)
        mbarrier.arrive(v_empty, count=1)
        count += 1
        t = pop(queue, count, 4)


@gluon.jit
def parts(BOXES: gl.constexpr, ROWS: gl.constexpr, dtype: gl.constexpr, shared: gl.constexpr):
    """Return buffers of three parts of the channels."""
    return (
        gl.allocate_shared_memory(dtype, [BOXES, ROWS, N], shared),
        gl.allocate_shared_memory(dtype, [BOXES, ROWS, N], shared),
        gl.allocate_shared_memory(dtype, [BOXES, ROWS, N], shared),
    )


@gluon.jit(do_not_specialize=["Tq", "Tk", "Hq", "tiles", "heads", "l2_heads", "zero"])
def backward_192_kernel(
    lse2, delta,
    q, k, v, do, dk, dv,
    sums, semaphores, counter,
    first, last, qfirst, qlast, stride_first, stride_ib, scale, scale_log2,
    Tq, Tk, Hq, tiles, heads, l2_heads, zero,
    shared: gl.constexpr, ds_shared: gl.constexpr, row_shared: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr,
):  # fmt: skip
    """dk, dv (B, Tk, Hkv, D) and, added to the zeros in sums, dq without the scale.

    The first eight are tensor maps. `sums`: fp32, for each head, tile of 64 queries and 64 channels
    16 rows of 256 (see `register_order`). `counter`: 0. `semaphores`, ordered: an int32, 0, for
    each head, tile of queries and consumer.
    """
    # shared memory
    dtype: gl.constexpr = q.dtype
    qs, dos = parts(2, N, dtype, shared), parts(2, N, dtype, shared)
    ks, vs = parts(3, BOX, dtype, shared), parts(3, BOX, dtype, shared)
    lses = gl.allocate_shared_memory(gl.float32, [2, 1, N], row_shared)
    deltas = gl.allocate_shared_memory(gl.float32, [2, 1, N], row_shared)
    pss = (
        gl.allocate_shared_memory(dtype, [2, N, N], shared),
        gl.allocate_shared_memory(dtype, [2, N, BOX], ds_shared),
    )
    dss = (
        gl.allocate_shared_memory(dtype, [2, N, N], shared),
        gl.allocate_shared_memory(dtype, [2, N, BOX], ds_shared),
    )
    buffers = Buffers(qs, ks, vs, dos, lses, deltas)
    loaded, queue = barriers(2)

    # warps
    # fmt: off
    gl.warp_specialize([
        (consumer, (
            sums, dv,
            buffers, pss, dss,
            loaded, queue,
            semaphores, first, last, qfirst, qlast, stride_first, stride_ib, scale, scale_log2,
            Tq, Tk, Hq, tiles, heads, l2_heads, zero,
            shared, GROUP, D, ORDERED, DIRECTIONS, 0,
        )),
        (consumer, (
            sums, dk,
            buffers, pss, dss,
            loaded, queue,
            semaphores, first, last, qfirst, qlast, stride_first, stride_ib, scale, scale_log2,
            Tq, Tk, Hq, tiles, heads, l2_heads, zero,
            shared, GROUP, D, ORDERED, DIRECTIONS, 1,
        )),
        (producer, (
            (q, q, q), (k, k, k), (v, v, v), (do, do, do), lse2, delta,
            buffers, loaded, queue,
            counter, qfirst, qlast, stride_ib,
            Tq, Tk, Hq, tiles, heads, l2_heads,
            GROUP, D, 3, N, KEYS, ORDERED, DIRECTIONS,
        )),
    ], [4, 1], [240, 24])
    # fmt: on
