"""FlashAttention backward for Hopper in Gluon, for heads of 256 channels.

Equations, letters and masks are those of portable.py; the launch is in hopper_backward.py, the
producer in hopper_order.py.

dk and dv of 64 keys fill half of the registers, so a program owns no more, and its two consumer
warpgroups have 128 channels each. Consumer 0 computes s and p, consumer 1 dp and ds, for all
channels; p and ds go through shared memory, and each consumer multiplies them for its own channels
of dv, dk and dq. The products of s and dp are of 64 columns, which shared memory can feed; were the
tile of queries split instead, they would be of 32, which it cannot. ds is of p as bf16 or fp16
holds it. dq goes from registers to sums in global memory, 64 channels at a time, four numbers by
one instruction; the last kernel sorts and scales them.

Every step loads 64 KiB and adds 64 KiB, for 64 keys: L2 is the limit. Shared memory is 224 KiB.

Ordered, each consumer waits for its part of dq to come from the tile of keys before, see
hopper_order.py.

Consumer 0 is ahead: while consumer 1 computes ds, it forms dq of the tile before. p is in its slot
until the ds of the next tile is written, ds until the p after the next is.

Buffers in shared memory: qs, dos, lses, deltas, pss, dss (two slots, by step), ks, vs. qs, dos, ks,
vs have two parts, the channels of each consumer. dv and dk leave from the places of v and k.
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

from longctx.kernels.attention.hopper_order import (
    Q_DO_EMPTY,
    Buffers,
    TileSchedule,
    barriers,
    bias_of_keys,
    key_tile,
    predecessor,
    producer,
    query_tile,
    release_added,
    wait_keys,
)
from longctx.kernels.attention.hopper_primitives import (
    HIDDEN_TANH,
    at_index,
    bar_arrive,
    bar_sync,
    mask_scores,
    part_buffers,
    pop,
    softcapped,
    start_scores,
    store_part,
    zero_product,
)
from longctx.kernels.attention.portable import LOG2E

N = gl.constexpr(64)  # queries of a tile, keys of a tile, and channels of dq at a time
OWN_CHANNELS = gl.constexpr(128)  # of a consumer
# Of the hardware's 16 named barriers Triton takes 0 to 3 for three partitions.
P_FULL = gl.constexpr(5)
DS_FULL = gl.constexpr(6)
OWN = gl.constexpr(7)  # 7 + consumer: its warps have written p or ds


@gluon.jit
def start_dq(ds, k, START: gl.constexpr, zeros):
    """Issue ds·k for the 64 channels from START on."""
    return warpgroup_mma(
        ds.permute((1, 0)), k.slice(START, N, dim=1), zeros, use_acc=False, is_async=True
    )


@gluon.constexpr_function
def axis_of(layout, axis):
    """The layout of a vector along one of the four axes of `layout`."""
    for other in (3, 2, 1, 0):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def add_dq(sums, dq):
    """Add dq (64, 64), in the order of registers, to the values at `sums`.

    Triton's own atomic addition would want registers for the old values.
    """
    x = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))  # as register_order
    four: gl.constexpr = gl.SliceLayout(4, gl.SliceLayout(5, x.type.layout))
    group = gl.arange(0, 8, layout=axis_of(four, 0))[:, None, None, None]
    warp = gl.arange(0, 4, layout=axis_of(four, 1))[None, :, None, None]
    row = gl.arange(0, 8, layout=axis_of(four, 2))[None, None, :, None]
    thread = gl.arange(0, 4, layout=axis_of(four, 3))[None, None, None, :]
    at = sums + 4 * (warp * 32 + row * 4 + thread) + 512 * group
    at = at.to(gl.int64, bitcast=True)[:, :, :, :, None, None]
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$1], {$5, $6, $7, $8};\n\tmov.u32 $0, 0;",
        "=r,l,l,l,l,f,f,f,f",
        [at, x],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def add_tile(
    dq, sums, semaphore, wait, before, ready,
    START: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Add 64 channels of a tile's dq to memory if `ready`; ordered, first wait for the turn."""
    if ready:
        if ORDERED and START == 0 and wait:
            while gl.load(semaphore, volatile=True) != before:
                pass
        add_dq(sums + START * N, dq)


@gluon.jit
def scores_step(
    s, dk, dv,
    sums, semaphore, wait, before, ready,
    ks, qs, dos, lses, pss, dss,
    m0, q_full, do_full,
    it, zero, more,
    qfirst_j, qlast_j, last_first, first_last, scale_log2, cap, key_bias,
    ORDERED: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Take one tile of queries in consumer 0, from its s: return the next tile's s, and dk, dv.

    dq is that of the tile before, if `ready`: it is formed while the other consumer computes ds.
    `it & zero` is 0, which the compiler does not know: else it would keep descriptors in registers.
    """
    dtype: gl.constexpr = qs[0].dtype
    layout: gl.constexpr = s.type.layout
    zeros = gl.zeros([N, N], gl.float32, layout=layout)
    now, after = it & 1, (it + 1) & 1
    k_own = ks[0].index(it & zero)

    # p = exp(s - lse)
    HIDDEN: gl.constexpr = float("-inf") if cap is None else HIDDEN_TANH
    if cap is not None:
        s = softcapped(s, cap)
    if (m0 < last_first) | (m0 + N - 1 > first_last):
        s = mask_scores(s, m0, qfirst_j, qlast_j, m0 < last_first, m0 + N - 1 > first_last, HIDDEN)
    lse_i = lses.index(now).load(layout)
    if HAS_BIAS:
        bias_j = gl.load(key_bias + gl.arange(0, N, layout=gl.SliceLayout(1, layout)))
        lse_i -= (bias_j[:, None] - lses.index(2 + now).load(layout)) * LOG2E
    p = gl.exp2(s * scale_log2 - lse_i)
    pss.index(now).store(p.to(dtype))
    if cap is not None:
        dss.index(now).store((p * (1.0 - s * s)).to(dtype))
    fence_async_shared()
    bar_arrive(P_FULL, 256)
    bar_sync(OWN, 128)

    # dv += p·do, dq of the tile before, the next tile's s
    mbarrier.wait(do_full.index(now), (it >> 1) & 1)
    dv_async = warpgroup_mma(pss.index(now), dos[0].index(now), dv, is_async=True)
    dq_async = start_dq(dss.index(after), k_own, 0, zeros)
    dv, dq = warpgroup_mma_wait(0, deps=(dv_async, dq_async))
    add_tile(dq, sums, semaphore, wait, before, ready, 0, ORDERED)
    dq_async = start_dq(dss.index(after), k_own, N, zeros)
    mbarrier.wait(q_full.index(after), ((it + 1) >> 1) & 1, pred=more)
    s = start_scores(at_index(ks, it & zero), qs, after, zeros)
    dq = warpgroup_mma_wait(2, deps=(dq_async,))
    add_tile(dq, sums, semaphore, wait, before, ready, N, ORDERED)
    if ORDERED:  # noqa: SIM102, the first is known when compiling
        if ready:
            release_added(semaphore, before, OWN)

    # dk += ds·q
    bar_sync(DS_FULL, 256)
    dk_async = warpgroup_mma(dss.index(now), qs[0].index(now), dk, is_async=True)
    s, dk = warpgroup_mma_wait(0, deps=(s, dk_async))
    bar_arrive(Q_DO_EMPTY + now, 288)
    return s, dk, dv


@gluon.jit
def gradient_step(
    dp, dk, dv,
    sums, semaphore, wait, before,
    ks, vs, qs, dos, deltas, pss, dss,
    q_full, do_full,
    it, zero, more, cap, key_bias,
    ORDERED: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Take one tile of queries in consumer 1, from its dp: return the next dp, and dk, dv."""
    dtype: gl.constexpr = qs[0].dtype
    layout: gl.constexpr = dp.type.layout
    zeros = gl.zeros([N, N], gl.float32, layout=layout)
    now, after = it & 1, (it + 1) & 1
    k_own = ks[1].index(it & zero)

    # dv += p·do, ds = p (dp - delta)
    bar_sync(P_FULL, 256)
    dv_async = warpgroup_mma(pss.index(now), dos[1].index(now), dv, is_async=True)
    ps = pss if cap is None else dss
    p = ps.index(now).load(layout).to(gl.float32)
    ds = dss.index(now)
    dp -= deltas.index(now).load(layout)
    if HAS_BIAS:
        weight = pss.index(now).load(layout).to(gl.float32)  # without a slope of tanh
        key_bias += N + gl.arange(0, N, layout=gl.SliceLayout(1, layout))
        gl.atomic_add(key_bias, gl.sum(weight * dp, axis=1), sem="relaxed")
    ds.store((p * dp).to(dtype))
    fence_async_shared()
    bar_arrive(DS_FULL, 256)
    bar_sync(OWN + 1, 128)

    # dk += ds·q, dq, the next tile's dp
    mbarrier.wait(q_full.index(now), (it >> 1) & 1)
    dk_async = warpgroup_mma(dss.index(now), qs[1].index(now), dk, is_async=True)
    dq_async = start_dq(dss.index(now), k_own, 0, zeros)
    v_all = at_index(vs, it & zero)
    dk, dv, dq = warpgroup_mma_wait(0, deps=(dk_async, dv_async, dq_async))
    bar_arrive(Q_DO_EMPTY + now, 288)
    # dq, 64 channels at a time
    add_tile(dq, sums, semaphore, wait, before, True, 0, ORDERED)
    dq_async = start_dq(dss.index(now), k_own, N, zeros)
    mbarrier.wait(do_full.index(after), ((it + 1) >> 1) & 1, pred=more)
    dp = start_scores(v_all, dos, after, zeros)
    dq = warpgroup_mma_wait(2, deps=(dq_async,))
    add_tile(dq, sums, semaphore, wait, before, True, N, ORDERED)
    if ORDERED:
        release_added(semaphore, before, OWN + 1)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    return dp, dk, dv


@gluon.jit
def consumer(
    sums, dk_map, dv_map,
    buffers, pss, dss,
    loaded, queue,
    semaphores, schedule, key_bias, scale, scale_log2, cap, zero,
    GROUP: gl.constexpr, D: gl.constexpr, ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Consumer C: its channels of dk and dv of each tile, and of dq at every step."""
    qs, ks, vs, dos, lses, deltas = buffers
    q_full, do_full, k_full, k_empty, v_full, v_empty = loaded
    _, _, _, Tq, Tk, Hq, _, _, _ = schedule
    dtype: gl.constexpr = qs[0].dtype
    zeros = zero_product(N)
    layout: gl.constexpr = zeros.type.layout
    it = 0
    count = 0
    t = pop(queue, count, 4)
    while t >= 0:
        # the tile of keys, the queries that see it
        b, kv_head, n0, down, lo, n, qfirst, qlast = key_tile(t, schedule, GROUP, N, N, ORDERED)
        from_query, to_query, before = predecessor(qfirst, qlast, n0, Tk, down, N)
        j = n0 + gl.arange(0, N, layout=gl.SliceLayout(1, layout))
        qfirst_j = gl.load(qfirst + j, mask=j < Tk, other=0)
        qlast_j = gl.load(qlast + j, mask=j < Tk, other=-1)
        last_first = gl.load(qfirst + gl.minimum(n0 + N, Tk) - 1)
        # no query sees keys past the end
        first_last = gl.load(qlast + n0, mask=n0 + N <= Tk, other=-1)

        own_rows, stride = bias_of_keys(key_bias, t, schedule, GROUP, N, N, ORDERED)
        dk = zero_product(OWN_CHANNELS)
        dv = zero_product(OWN_CHANNELS)
        wait_keys(k_full, count)
        wait_keys(v_full, count)
        if n > 0:
            # prologue: s or dp of the first tile of queries
            xs, full, ys = (ks, q_full, qs) if C == 0 else (vs, do_full, dos)
            mbarrier.wait(full.index(it & 1), (it >> 1) & 1)
            s_async = start_scores(at_index(xs, count & zero), ys, it & 1, zeros)
            s = warpgroup_mma_wait(0, deps=(s_async,))

            # steady state
            first_tile = (b * Hq + kv_head * GROUP) * gl.cdiv(Tq, N)
            tile = first_tile
            wait = False
            for x in range(n * GROUP):
                tile_before, wait_before = tile, wait
                m, head = query_tile(x, lo, n, down, GROUP, DIRECTIONS)
                tile = first_tile + head * gl.cdiv(Tq, N) + m
                bias_of_head = own_rows + head * stride
                wait = ((m + 1) * N > from_query) & (m * N <= to_query)
                if C == 0:
                    s, dk, dv = scores_step(
                        s, dk, dv,
                        sums + tile_before.to(gl.int64) * (N * D), semaphores + 2 * tile_before,
                        wait_before, before, x > 0,
                        ks, qs, dos, lses, pss, dss,
                        m * N, q_full, do_full,
                        it, zero, x + 1 < n * GROUP,
                        qfirst_j, qlast_j, last_first, first_last, scale_log2, cap, bias_of_head,
                        ORDERED, key_bias is not None,
                    )  # fmt: skip
                else:
                    s, dk, dv = gradient_step(
                        s, dk, dv,
                        sums + tile.to(gl.int64) * (N * D) + N * OWN_CHANNELS,
                        semaphores + 2 * tile + 1,
                        wait, before,
                        ks, vs, qs, dos, deltas, pss, dss,
                        q_full, do_full,
                        it, zero, x + 1 < n * GROUP, cap, bias_of_head,
                        ORDERED, key_bias is not None,
                    )  # fmt: skip
                it += 1
            if C == 0:
                # dq of the last tile
                at = sums + tile.to(gl.int64) * (N * D)
                semaphore = semaphores + 2 * tile
                ds = dss.index((it + 1) & 1)
                k_own = ks[0].index(it & zero)
                dq = warpgroup_mma_wait(0, deps=(start_dq(ds, k_own, 0, zeros),))
                add_tile(dq, at, semaphore, wait, before, True, 0, ORDERED)
                dq = warpgroup_mma_wait(0, deps=(start_dq(ds, k_own, N, zeros),))
                add_tile(dq, at, semaphore, wait, before, True, N, ORDERED)
                if ORDERED:
                    release_added(semaphore, before, OWN)

        # epilogue: dv and dk leave from the places of v and k, which nobody reads any more
        dv_own, dk_own = vs[C].index(0), ks[C].index(0)
        dv_own.store(dv.to(dtype))
        dk_own.store((dk * scale).to(dtype))
        fence_async_shared()
        store_part(dv_map, dv_own, b, n0, kv_head, C * OWN_CHANNELS)
        store_part(dk_map, dk_own, b, n0, kv_head, C * OWN_CHANNELS)
        tma.store_wait(0)
        mbarrier.arrive(k_empty.index(0), count=1)
        mbarrier.arrive(v_empty.index(0), count=1)
        count += 1
        t = pop(queue, count, 4)


@gluon.jit(do_not_specialize=["Tq", "Tk", "Hq", "tiles", "heads", "l2_heads", "zero"])
def backward_256_kernel(
    lse2, delta, references,
    q, k, v, do, dk, dv,
    sums, semaphores, counter, qfirst, qlast, key_bias, stride_ib, scale, scale_log2, cap,
    Tq, Tk, Hq, tiles, heads, l2_heads, zero,
    shared: gl.constexpr, ds_shared: gl.constexpr, row_shared: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr,
):  # fmt: skip
    """dk, dv (B, Tk, Hkv, D) and, added to the zeros in sums, dq without the scale.

    The first nine are tensor maps. `references`, `key_bias`: `of_bias`, or None. `sums`: fp32, for
    each head, tile of 64 queries and 64 channels 16 rows of 256 (see `register_order`). `counter`:
    0. `semaphores`, ordered: an int32, 0, for each head, tile of queries and consumer.
    """
    # shared memory
    dtype: gl.constexpr = q.dtype
    qs = part_buffers(dtype, 2, N, OWN_CHANNELS, shared, OWN_CHANNELS, shared)
    dos = part_buffers(dtype, 2, N, OWN_CHANNELS, shared, OWN_CHANNELS, shared)
    ks = part_buffers(dtype, 1, N, OWN_CHANNELS, shared, OWN_CHANNELS, shared)
    vs = part_buffers(dtype, 1, N, OWN_CHANNELS, shared, OWN_CHANNELS, shared)
    lses = gl.allocate_shared_memory(gl.float32, [2 if key_bias is None else 4, 1, N], row_shared)
    deltas = gl.allocate_shared_memory(gl.float32, [2, 1, N], row_shared)
    pss = gl.allocate_shared_memory(dtype, [2, N, N], ds_shared)
    dss = gl.allocate_shared_memory(dtype, [2, N, N], ds_shared)
    buffers = Buffers(qs, ks, vs, dos, lses, deltas)
    loaded, queue = barriers(2)
    schedule = TileSchedule(qfirst, qlast, stride_ib, Tq, Tk, Hq, tiles, heads, l2_heads)

    # warps: two consumers, the producer
    # fmt: off
    gl.warp_specialize([
        (consumer, (
            sums, dk, dv,
            buffers, pss, dss,
            loaded, queue,
            semaphores, schedule, key_bias, scale, scale_log2, cap, zero,
            GROUP, D, ORDERED, DIRECTIONS, c,
        )) if c < 2 else (producer, (
            (q, q), (k, k), (v, v), (do, do), lse2, delta,
            references, buffers, loaded, queue,
            counter, schedule,
            GROUP, D, N, N, ORDERED, DIRECTIONS,
        ))
        for c in (0, 1, 2)
    ], [4, 1], [240, 24])
    # fmt: on
