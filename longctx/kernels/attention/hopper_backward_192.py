"""FlashAttention backward for Hopper in Gluon, for heads of 192 channels.

Equations, letters and masks are those of portable.py; the launch is in hopper_backward.py, the
producer in hopper_order.py.

Every step loads a tile of q and do from L2 and adds a tile of dq there, for all keys of a program:
the more keys, the less it waits for L2. 96 are the most whose dk and dv fit into registers; compare
FlashAttention-3 (arXiv 2407.08608), whose tile is the same. Consumer 0 owns dv, consumer 1 dk. A
step of each, beside the other's:

    consumer 0                               consumer 1
    p = exp(s - lse) to shared memory        ds = p (dp - delta) to shared memory
    dv += p·do; release q and do             64 channels of dq
    128 channels of dq                       dk += ds·q; release q and do
    s of the next tile of queries            dp of the next tile of queries

Sides of tensors are powers of two, so the keys come in two pieces, of 64 and of 32, and the
channels in three parts of 64. dk and dv are transposed: their rows, of which a product has 64, are
channels. Products of so few columns ask for their operands in shared memory as fast as it can give
them. So qᵀ and doᵀ of dk and dv, which two products share, are read once, into registers, and ds
of consumer 1's part of dq does not leave them.

Each consumer has a writer warp that adds its parts of dq, in fp32, to sums in global memory by TMA,
as in hopper_backward.py. Adding them from registers held up the loads and stores of p and ds.

Only one p and one ds are there. Consumer 1 has used p when it reports ds of the same step, for
which consumer 0 waits before it forms dq. Consumer 0 has used ds before it reports the next p.

Buffers in shared memory, 226 KiB: qs, dos, lses, deltas (two slots, by step), pss, dss, ks, vs,
dq_part (one for each consumer). qs, dos, ks, vs have three parts, of channels; pss, dss two, of
keys. ks and vs have both pieces of the keys, first the three parts of 64, in two boxes, then those
of 32. dv and dk leave from the places of v and k.
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
    release_sent,
    wait_keys,
)
from longctx.kernels.attention.hopper_primitives import (
    HIDDEN_TANH,
    bar_arrive,
    bar_sync,
    mask_scores,
    mbarriers,
    part_buffers,
    pop,
    register_order,
    reinterpret,
    softcapped,
    store_part,
    tma_add,
    zero_product,
)
from longctx.kernels.attention.portable import LOG2E

N = gl.constexpr(64)  # queries of a tile, channels of a part
KEYS = gl.constexpr(96)  # of a tile
BOX = gl.constexpr(32)  # rows of the tensor maps of keys
# Of the hardware's 16 named barriers Triton takes 0 to 5 for five partitions.
P_FULL = gl.constexpr(6)
DS_FULL = gl.constexpr(7)
OWN = gl.constexpr(8)  # 8 + consumer: its warps have written p or ds
DQ_FULL = gl.constexpr(10)  # 10 + consumer: its part of dq is written
WALKED = gl.constexpr(12)  # k and v have been read
# 13 and 14: Q_DO_EMPTY
DS_EMPTY = gl.constexpr(15)  # capped: consumer 1 has used ds


@gluon.jit
def pieces(xs, i, zero, shared: gl.constexpr):
    """Return both pieces of keys, (64, 64) and (32, 64), of part i of k or v.

    `zero` is 0, which the compiler does not know: else it would keep descriptors in registers.
    """
    first = reinterpret(xs[i], xs[i].dtype, [1, 2 * BOX, N], shared).index(zero)
    return first, xs[3 + i].index(zero)


@gluon.jit
def start_scores(xs, stage, ys, zero, shared: gl.constexpr, PIECE: gl.constexpr):
    """Issue x·yᵀ of a piece of the keys in y: a product for each part of the channels."""
    s = zero_product(N if PIECE == 0 else BOX)
    for i in gl.static_range(3):
        y = pieces(ys, i, zero, shared)[PIECE]
        s = warpgroup_mma(xs[i].index(stage), y.permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def transposed(xs, i, stage):
    """Return part i of the channels of q or do, transposed, in registers."""
    sums: gl.constexpr = zero_product(N).type.layout
    return xs[i].index(stage).permute((1, 0)).load(gl.DotOperandLayout(0, sums, 2))


@gluon.jit
def start_sum(sums, i: gl.constexpr, x, ps, zero):
    """Issue sums += x·p, of part i of the channels and both pieces of the keys.

    Wait for all three parts before dq comes: ptxas 12.8 may overwrite registers that a product
    still reads (triton#9433), and there would not be enough.
    """
    first, last = sums[2 * i], sums[2 * i + 1]
    same: gl.constexpr = gl.DotOperandLayout(0, last.type.layout, 2)
    return (
        warpgroup_mma(x, ps[0].index(zero), first, is_async=True),
        warpgroup_mma(gl.convert_layout(x, same), ps[1].index(zero), last, is_async=True),
    )


@gluon.jit
def start_dq(ds, ks, i, dq, zero, shared: gl.constexpr):
    """Issue ds·k for part i of the channels, a product for each piece of the keys.

    It takes the registers of dq and drops their values. With a plain use_acc=False the compiler
    would take others, and spill; it does not know that `zero` is 0.
    """
    k0, k1 = pieces(ks, i, zero, shared)
    dq = warpgroup_mma(ds[0], k0, dq, use_acc=zero > 0, is_async=True)
    return warpgroup_mma(ds[1], k1, dq, is_async=True)


@gluon.jit
def send_dq(dq, dq_part, empty, phase, always, C: gl.constexpr):
    """Give a part of dq to the writer, once its place is empty.

    `always` is true. While the next product runs the compiler must not know it: without the branch
    it would copy dq, and spill.
    """
    if always:
        mbarrier.wait(empty, phase)
        dq_part.store(register_order(dq))
        fence_async_shared()
        bar_arrive(DQ_FULL + C, 160)


@gluon.jit
def store_p(
    s, lse, references, p,
    n0, m0, first, last, row, Tq, before, after, scale_log2, cap, slopes, key_bias,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """p = exp(s - lse), of a piece of the keys, from n0 on; capped, `slopes` are p (1 - tanh²).

    `before`, `after`: some query may not see the first keys of the tile, or the last ones.
    """
    layout: gl.constexpr = s.type.layout
    HIDDEN: gl.constexpr = float("-inf") if cap is None else HIDDEN_TANH
    if cap is not None:
        s = softcapped(s, cap)
    if before | after:
        i = m0 + gl.arange(0, N, layout=gl.SliceLayout(1, layout))
        # queries past the end see no key
        first_i = gl.load(first + row + i, mask=i < Tq, other=2147483647)
        last_i = gl.load(last + row + i, mask=i < Tq, other=-1)
        s = mask_scores(s, n0, first_i, last_i, before, after, HIDDEN)
    lse_i = lse.permute((1, 0)).load(layout)
    if HAS_BIAS:
        key_bias += gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
        lse_i -= (gl.load(key_bias)[None, :] - references.permute((1, 0)).load(layout)) * LOG2E
    x = gl.exp2(s * scale_log2 - lse_i)
    if cap is not None:
        slopes.store((x * (1.0 - s * s)).to(p.dtype))
    p.store(x.to(p.dtype))


@gluon.jit
def store_ds(dp, delta, p, ps, dss, slot, key_bias, cap, HAS_BIAS: gl.constexpr):
    """ds = p (dp - delta), of a piece of the keys. Return it as an operand of dq.

    With a bias each warp sums its queries' gradients of it; `ps` has p without the slope of tanh.
    """
    ds = dss.index(slot)
    x = p.to(gl.float32)
    dp -= delta.permute((1, 0)).load(dp.type.layout)
    x *= dp
    if HAS_BIAS:
        gradient = x if cap is None else ps.index(slot).load(dp.type.layout).to(gl.float32) * dp
        gradient = gl.sum(gradient.reshape([4, N // 4, dp.shape[1]]), axis=1)
        warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gradient.type.layout))[:, None]
        j = gl.arange(0, dp.shape[1], layout=gl.SliceLayout(0, gradient.type.layout))[None, :]
        gl.atomic_add(key_bias + (KEYS + KEYS * warp + j), gradient, sem="relaxed")
    x = x.to(ds.dtype)
    ds.store(x)
    dq: gl.constexpr = zero_product(N).type.layout
    return gl.convert_layout(x, gl.DotOperandLayout(0, dq, 2))


@gluon.jit
def scores_step(
    s, dv,
    ks, qs, dos, lses, pss, dss, dq_part,
    first, last, row, m0, n0, Tq, keys_before, keys_after, scale_log2, cap, key_bias,
    q_full, do_full, dq_empty,
    it, zero, x, more,
    shared: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Take one tile of queries in consumer 0, from its s: return the next tile's s, and dv."""
    now, after = it & 1, (it + 1) & 1
    slot = it & zero  # 0, the only one; the compiler does not know it
    # p = exp(s - lse)
    if cap is not None:  # noqa: SIM102, the first is known when compiling
        if x > 0:
            bar_sync(DS_EMPTY, 256)
    for i in gl.static_range(2):
        store_p(
            s[i], lses.index(now), lses.index(2 + now), pss[i].index(slot),
            n0 + i * N, m0, first, last, row, Tq, keys_before, keys_after, scale_log2, cap,
            dss[i].index(slot), key_bias + i * N, HAS_BIAS,
        )  # fmt: skip
    fence_async_shared()
    bar_arrive(P_FULL, 256)
    bar_sync(OWN, 128)

    # dv += p·do
    mbarrier.wait(do_full.index(now), (it >> 1) & 1)
    s0, s1 = start_sum(dv, 0, transposed(dos, 0, now), pss, slot)
    s2, s3 = start_sum(dv, 1, transposed(dos, 1, now), pss, slot)
    s4, s5 = start_sum(dv, 2, transposed(dos, 2, now), pss, slot)
    dv = warpgroup_mma_wait(0, deps=(s0, s1, s2, s3, s4, s5))
    bar_arrive(Q_DO_EMPTY + now, 288)

    # dq, s of the next tile
    bar_sync(DS_FULL, 256)
    ds = (dss[0].index(slot), dss[1].index(slot))
    dq_async = start_dq(ds, ks, 0, zero_product(N), slot, shared)
    dq = warpgroup_mma_wait(0, deps=(dq_async,))
    send_dq(dq, dq_part.index(slot), dq_empty, 1, True, 0)
    dq_async = start_dq(ds, ks, 1, dq, slot, shared)
    mbarrier.wait(q_full.index(after), ((it + 1) >> 1) & 1, pred=more)
    s1 = start_scores(qs, after, ks, slot, shared, 1)
    dq = warpgroup_mma_wait(3, deps=(dq_async,))
    send_dq(dq, dq_part.index(slot), dq_empty, 0, zero == 0, 0)
    s0 = start_scores(qs, after, ks, slot, shared, 0)
    s = warpgroup_mma_wait(0, deps=(s0, s1))
    return s, dv


@gluon.jit
def gradient_step(
    dp, dk,
    ks, vs, qs, dos, deltas, pss, dss, dq_part,
    q_full, do_full, dq_empty,
    it, zero, more, cap, key_bias,
    shared: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Take one tile of queries in consumer 1, from its dp: return the next tile's dp, and dk."""
    now, after = it & 1, (it + 1) & 1
    slot = it & zero  # 0, the only one; the compiler does not know it
    # ds = p (dp - delta)
    bar_sync(P_FULL, 256)
    ps = pss if cap is None else dss
    p0 = ps[0].index(slot).load(dp[0].type.layout)
    if not HAS_BIAS:
        p1 = ps[1].index(slot).load(dp[1].type.layout)
    ds0 = store_ds(dp[0], deltas.index(now), p0, pss[0], dss[0], slot, key_bias, cap, HAS_BIAS)
    if HAS_BIAS:  # the sums before left no registers for it
        p1 = ps[1].index(slot).load(dp[1].type.layout)
    ds1 = store_ds(dp[1], deltas.index(now), p1, pss[1], dss[1], slot, key_bias + N, cap, HAS_BIAS)
    fence_async_shared()
    bar_arrive(DS_FULL, 256)

    # dq
    dq_async = start_dq((ds0, ds1), ks, 2, zero_product(N), slot, shared)
    dq, ds0, ds1 = warpgroup_mma_wait(0, deps=(dq_async, ds0, ds1))

    # dk += ds·q
    mbarrier.wait(q_full.index(now), (it >> 1) & 1)
    x = transposed(qs, 0, now)
    bar_sync(OWN + 1, 128)
    s0, s1 = start_sum(dk, 0, x, dss, slot)
    send_dq(dq, dq_part.index(slot), dq_empty, (it & 1) ^ 1, zero == 0, 1)
    s2, s3 = start_sum(dk, 1, transposed(qs, 1, now), dss, slot)
    s4, s5 = start_sum(dk, 2, transposed(qs, 2, now), dss, slot)
    dk = warpgroup_mma_wait(0, deps=(s0, s1, s2, s3, s4, s5))
    bar_arrive(Q_DO_EMPTY + now, 288)
    if cap is not None:  # noqa: SIM102
        if more:
            bar_arrive(DS_EMPTY, 256)

    # dp of the next tile
    mbarrier.wait(do_full.index(after), ((it + 1) >> 1) & 1, pred=more)
    dp0 = start_scores(dos, after, vs, slot, shared, 0)
    dp1 = start_scores(dos, after, vs, slot, shared, 1)
    dp = warpgroup_mma_wait(0, deps=(dp0, dp1))
    return dp, dk


@gluon.jit
def writer(
    dq, dq_part, dq_empty, queue,
    semaphores, schedule,
    GROUP: gl.constexpr, ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Add the parts of dq of consumer C to memory: the first two, or the last."""
    _, _, _, Tq, Tk, Hq, _, _, _ = schedule
    count = 0
    t = pop(queue, count, 1)
    while t >= 0:
        b, kv_head, n0, down, lo, n, qfirst, qlast = key_tile(t, schedule, GROUP, N, KEYS, ORDERED)
        from_query, to_query, before = predecessor(qfirst, qlast, n0, Tk, down, KEYS)
        for x in range(n * GROUP):
            m, head = query_tile(x, lo, n, down, GROUP, DIRECTIONS)
            tile = (b * Hq + kv_head * GROUP + head) * gl.cdiv(Tq, N) + m
            semaphore = semaphores + 2 * tile + C
            if ORDERED and ((m + 1) * N > from_query) & (m * N <= to_query):
                # it need not acquire: sums are added in L2
                while gl.load(semaphore, volatile=True) != before:
                    pass
            for i in gl.static_range(2 - C):
                bar_sync(DQ_FULL + C, 160)
                tma_add(dq, [tile * 48 + (2 * C + i) * 16, 0], dq_part.index(0))
                tma.store_wait(0)
                mbarrier.arrive(dq_empty, count=1)
            if ORDERED:
                release_sent(semaphore, before)
        count += 1
        t = pop(queue, count, 1)


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
            box = xs[i].index(j) if j < 2 else xs[3 + i].index(0)
            store_part(x_map, box, b, n0 + j * BOX, h, i * N)
    tma.store_wait(0)


@gluon.jit
def consumer(
    out_map,
    buffers, pss, dss, dq_part,
    loaded, dq_empty, queue,
    first, last, stride_first, schedule, key_bias, scale, scale_log2, cap, zero,
    shared: gl.constexpr, GROUP: gl.constexpr,
    ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C: dv or dk of each tile, and its channels of dq at every step."""
    qs, ks, vs, dos, lses, deltas = buffers
    q_full, do_full, k_full, k_empty, v_full, v_empty = loaded
    _, _, _, Tq, Tk, _, _, _, _ = schedule
    it = 0
    count = 0
    t = pop(queue, count, 4)
    while t >= 0:
        # the tile of keys, the queries that see it
        b, kv_head, n0, down, lo, n, qfirst, qlast = key_tile(t, schedule, GROUP, N, KEYS, ORDERED)
        # queries from last_first to first_last see all keys; none sees keys past the end
        last_first = gl.load(qfirst + gl.minimum(n0 + KEYS, Tk) - 1)
        first_last = gl.load(qlast + n0)
        last_first = gl.where(n0 + KEYS > Tk, 2147483647, last_first)

        own_rows, stride = bias_of_keys(key_bias, t, schedule, GROUP, N, KEYS, ORDERED)
        out = (
            zero_product(N), zero_product(BOX), zero_product(N),
            zero_product(BOX), zero_product(N), zero_product(BOX),
        )  # fmt: skip
        wait_keys(k_full, count)
        wait_keys(v_full, count)
        if n > 0:
            # prologue: s or dp of the first tile of queries
            xs, full, ys = (qs, q_full, ks) if C == 0 else (dos, do_full, vs)
            mbarrier.wait(full.index(it & 1), (it >> 1) & 1)
            s0 = start_scores(xs, it & 1, ys, it & zero, shared, 0)
            s1 = start_scores(xs, it & 1, ys, it & zero, shared, 1)
            s = warpgroup_mma_wait(0, deps=(s0, s1))

            # steady state
            for x in range(n * GROUP):
                m, head = query_tile(x, lo, n, down, GROUP, DIRECTIONS)
                bias_of_head = own_rows + head * stride
                m0 = m * N
                if C == 0:
                    s, out = scores_step(
                        s, out,
                        ks, qs, dos, lses, pss, dss, dq_part,
                        first, last, b * stride_first, m0, n0, Tq,
                        m0 + N - 1 > first_last, m0 < last_first, scale_log2, cap, bias_of_head,
                        q_full, do_full, dq_empty,
                        it, zero, x, x + 1 < n * GROUP,
                        shared, key_bias is not None,
                    )  # fmt: skip
                else:
                    s, out = gradient_step(
                        s, out,
                        ks, vs, qs, dos, deltas, pss, dss, dq_part,
                        q_full, do_full, dq_empty,
                        it, zero, x + 1 < n * GROUP, cap, bias_of_head,
                        shared, key_bias is not None,
                    )  # fmt: skip
                it += 1

        # epilogue: dv and dk leave from the places of v and k, once both consumers have read them
        bar_sync(WALKED, 256)
        if C == 0:
            store_tile(out_map, vs, out, 1.0, b, n0, kv_head, shared)
        else:
            store_tile(out_map, ks, out, scale, b, n0, kv_head, shared)
        mbarrier.arrive(k_empty.index(0), count=1)
        mbarrier.arrive(v_empty.index(0), count=1)
        count += 1
        t = pop(queue, count, 4)


@gluon.jit(do_not_specialize=["Tq", "Tk", "Hq", "tiles", "heads", "l2_heads", "zero"])
def backward_192_kernel(
    lse2, delta, references,
    q, k, v, do, dk, dv, dq,
    semaphores, counter,
    first, last, qfirst, qlast, key_bias, stride_first, stride_ib, scale, scale_log2, cap,
    Tq, Tk, Hq, tiles, heads, l2_heads, zero,
    shared: gl.constexpr, ds_shared: gl.constexpr, row_shared: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, ORDERED: gl.constexpr, DIRECTIONS: gl.constexpr,
):  # fmt: skip
    """dk, dv (B, Tk, Hkv, D) and, added to the zeros in dq, the sums of dq without the scale.

    The first ten are tensor maps. `references`, `key_bias`: `of_bias`, or None. dq: fp32, for each
    head, tile of 64 queries and 64 channels 16 rows of 256 (see `register_order`). `counter`: 0.
    `semaphores`, ordered: an int32, 0, for each head, tile of queries and consumer.
    """
    # shared memory
    dtype: gl.constexpr = q.dtype
    qs = [gl.allocate_shared_memory(dtype, [2, N, N], shared) for _ in (0, 1, 2)]
    dos = [gl.allocate_shared_memory(dtype, [2, N, N], shared) for _ in (0, 1, 2)]
    ks = [gl.allocate_shared_memory(dtype, [n, BOX, N], shared) for n in (2, 2, 2, 1, 1, 1)]
    vs = [gl.allocate_shared_memory(dtype, [n, BOX, N], shared) for n in (2, 2, 2, 1, 1, 1)]
    lses = gl.allocate_shared_memory(gl.float32, [2 if key_bias is None else 4, 1, N], row_shared)
    deltas = gl.allocate_shared_memory(gl.float32, [2, 1, N], row_shared)
    pss = part_buffers(dtype, 1, N, N, shared, BOX, ds_shared)
    dss = part_buffers(dtype, 1, N, N, shared, BOX, ds_shared)
    buffers = Buffers(qs, ks, vs, dos, lses, deltas)
    dq_part = [gl.allocate_shared_memory(gl.float32, [1, 16, 256], row_shared) for _ in (0, 1)]
    # consumers and writers pop the queue
    loaded, queue = barriers(4)
    dq_empty = mbarriers(2, 1)
    schedule = TileSchedule(qfirst, qlast, stride_ib, Tq, Tk, Hq, tiles, heads, l2_heads)

    # warps: two consumers, two writers, the producer
    # fmt: off
    gl.warp_specialize([
        (consumer, (
            (dv, dk)[c],
            buffers, pss, dss, dq_part[c],
            loaded, dq_empty.index(c), queue,
            first, last, stride_first, schedule, key_bias, scale, scale_log2, cap, zero,
            shared, GROUP, ORDERED, DIRECTIONS, c,
        )) if c < 2 else (writer, (
            dq, dq_part[c - 2], dq_empty.index(c - 2), queue,
            semaphores, schedule,
            GROUP, ORDERED, DIRECTIONS, c - 2,
        )) if c < 4 else (producer, (
            (q, q, q), (k, k, k), (v, v, v), (do, do, do), lse2, delta,
            references, buffers, loaded, queue,
            counter, schedule,
            GROUP, D, N, KEYS, ORDERED, DIRECTIONS,
        ))
        for c in (0, 1, 2, 3, 4)
    ], [4, 1, 1, 1], [240, 24, 24, 24])
    # fmt: on
