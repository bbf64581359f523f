"""Building blocks of the Hopper kernels: barriers, the tile queue, channels in parts, masks, maps.

The tile queue has two slots. The producer warp pushes the number of the program's next tile, -1
after the last, and what it found out about it; every other warp pops them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longctx.kernels.attention import Intervals, Scores
from longctx.kernels.attention.portable import LOG2E, padded_reference


@builtin
def _reduce_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
    )


@builtin
def reinterpret(x: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Return the same shared memory as another type, shape and layout."""
    plain = [getattr(n, "value", n) for n in shape]
    return _semantic.memdesc_reinterpret(
        x, getattr(dtype, "value", dtype), plain, getattr(layout, "value", layout)
    )


@functools.cache
def shared_layout(shape: tuple[int, ...], dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of a tile in shared memory for matrix products and tensor maps.

    Cached, since making one takes as long as a launch.
    """
    return gl.NVMMASharedLayout.get_default_for(list(shape), dtype)


# Gluon of Triton 3.8 renamed the copies and made the reduction public; 3.9 removed the old names.
renamed = hasattr(tma, "async_load")
# (descriptor, coordinates, barrier, shared)
tma_load = tma.async_load if renamed else tma.async_copy_global_to_shared
# (descriptor, coordinates, shared)
tma_store = tma.async_store if renamed else tma.async_copy_shared_to_global
# as tma_store, but adds
tma_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _reduce_add

ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def _bar(HOW: gl.constexpr, i, THREADS: gl.constexpr):
    PTX: gl.constexpr = f"bar.{HOW} $1, {THREADS};\n\tmov.u32 $0, 0;"
    gl.inline_asm_elementwise(PTX, "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bar_sync(i, THREADS: gl.constexpr):
    """Wait at named barrier i until THREADS threads have arrived."""
    _bar("sync", i, THREADS)


@gluon.jit
def bar_arrive(i, THREADS: gl.constexpr):
    """Arrive at named barrier i, for which THREADS threads are counted, without waiting."""
    _bar("arrive", i, THREADS)


class Queue(NamedTuple):
    """Two slots of numbers, and the mbarriers that say a slot was written or read."""

    slots: Any
    full: Any
    empty: Any


@gluon.jit
def mbarriers(N: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return N mbarriers, initialised, for so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def tile_queue(READERS: gl.constexpr, NUMBERS: gl.constexpr = 1):
    """Return an empty tile queue, which READERS warps or warpgroups pop."""
    one_int: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    slots = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], one_int)
    return Queue(slots, mbarriers(2, 1), mbarriers(2, READERS))


@gluon.jit
def push(queue, count, numbers):
    """Put the numbers of this program's count-th tile into the queue, once its slot was read."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(queue.empty.index(count % 2), ((count // 2) & 1) ^ 1)
    for i in gl.static_range(len(numbers)):
        at = queue.slots.index(2 * i + count % 2)
        at.store(gl.full([1], 0, gl.int32, layout=one) + numbers[i])
    mbarrier.arrive(queue.full.index(count % 2), count=1)


@gluon.jit
def pop_all(queue, count, WARPS: gl.constexpr, places):
    """Return the numbers of this program's count-th tile, for a reader of WARPS warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(queue.full.index(count % 2), (count // 2) & 1)
    numbers = [gl.max(queue.slots.index(2 * i + count % 2).load(layout), axis=0) for i in places]
    mbarrier.arrive(queue.empty.index(count % 2), count=1)
    return numbers


@gluon.jit
def pop(queue, count, WARPS: gl.constexpr):
    """Return this program's count-th tile, -1 after the last, for a reader of WARPS warps."""
    return pop_all(queue, count, WARPS, (0,))[0]


@gluon.constexpr_function
def _rounding_error(N):
    """Return PTX of `rounding_error` for N numbers of a thread: of two rows, a pair of each in
    turn.

    Operands: N results, of which the first of each row counts; N / 2 pairs of bf16; N times its
    row's `plain`; N times its row's `limit`.
    """
    plain, limit = 3 * N // 2, 5 * N // 2
    lines = [
        ".reg .pred any; .reg .f32 a, b, c, d, low, high;",
        f"setp.gt.f32 any, ${plain}, ${limit};",
        f"setp.gt.or.f32 any, ${plain + 2}, ${limit + 2}, any;",
        "vote.sync.any.pred any, any, 0xffffffff;",
        "mov.f32 $0, 0f00000000; mov.f32 $2, 0f00000000;",
        "@!any bra.uni DONE;",
        f"neg.f32 a, ${plain}; mov.f32 b, 0f00000000;",
        f"neg.f32 c, ${plain + 2}; mov.f32 d, 0f00000000;",
    ]
    for pair in range(N // 2):
        x, y = "cd" if pair % 2 else "ab"
        lines += [
            f"shl.b32 low, ${N + pair}, 16; and.b32 high, ${N + pair}, 0xffff0000;",
            f"add.f32 {x}, {x}, low; add.f32 {y}, {y}, high;",
        ]
    return "\n".join(["{", *lines, "add.f32 $0, a, b; add.f32 $2, c, d;", "DONE:", "}"])


@gluon.constexpr_function
def _operands(results, N, packed, others, in_place=False):
    tied = [str(i) for i in range(N)] if in_place else []
    return ",".join([results] * N + tied + ["r"] * packed + ["f"] * others)


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def rounding_error(p16, plain, limit):
    """Return row sums of p16 less `plain` (rows, 4), those of p; 0 if no `plain` exceeds its row's
    limit.

    A warp decides for all its rows, by a branch: if the answer is no, it costs next to nothing.
    Triton has no such branch. p16 is (64, BN) bf16, an operand of a product.
    """
    gl.static_assert(p16.shape[0] == 64 and p16.dtype == gl.bfloat16)
    BN: gl.constexpr = p16.shape[1]
    layout: gl.constexpr = p16.type.layout
    parts: gl.constexpr = p16.reshape([64, BN // 8, 4, 2]).type.layout
    sums: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts))
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts)))
    plain_ = gl.convert_layout(plain, sums)[:, None, :, None].broadcast_to([64, BN // 8, 4, 2])
    limit_ = gl.convert_layout(limit, rows)[:, None, None, None]
    limit_ = limit_.broadcast_to([64, BN // 8, 4, 2])
    error = gl.inline_asm_elementwise(
        _rounding_error(BN // 2),
        _operands("=f", BN // 2, BN // 4, BN),
        [
            p16,
            gl.convert_layout(plain_.reshape([64, BN]), layout),
            gl.convert_layout(limit_.reshape([64, BN]), layout),
        ],
        dtype=gl.float32,
        is_pure=True,
        pack=BN // 2,
    )
    error = gl.reduce(gl.reduce(error.reshape([64, BN // 8, 4, 2]), 3, _first), 1, _first)
    return gl.convert_layout(error, plain.type.layout)


# For |x| < 0.45 tanh(x) is a sum of TANH[k] · x^(2k + 1), to 2^-16 of itself
TANH = (1.0, -0.33248236, 0.11938138)
TOGETHER = 8  # numbers in turn: an instruction would wait for the one before it
# of a hidden key in place of -inf: its square is finite, and p = 0 takes the slope 1 - tanh²
HIDDEN_TANH = gl.constexpr(-(2.0**63))


@gluon.constexpr_function
def _softcapped(N, EXPONENTIALS, IN_PLACE):
    """Return PTX of `softcapped` for N numbers of a thread: N results, then N of s and of cap.

    With EXPONENTIALS N of scale follow, and N of its row's -m.
    """
    cap, scale = f"${2 * N}", f"${3 * N}" if EXPONENTIALS else "1.0"
    first = 0 if IN_PLACE else N  # operand of s
    polynomial = ["mul.f32 y#, IN, IN;", "fma.rn.f32 t#, y#, c2, c1;"]
    polynomial += ["fma.rn.f32 t#, t#, y#, c0;", "mul.f32 OUT, t#, IN;"]
    exponential = [  # 1 - 2 / (1 + exp(2 x))
        "mul.f32 y#, IN, e;",
        *("ex2.approx.ftz.f32 y#, y#;", "add.f32 y#, y#, 1.0;", "rcp.approx.ftz.f32 y#, y#;"),
        "fma.rn.f32 OUT, y#, -2.0, 1.0;",
    ]
    if EXPONENTIALS:
        exp2 = "ex2.approx.ftz.f32 OUT, OUT;"
        polynomial[-1:] = ["fma.rn.f32 OUT, t#, IN, ROW;", exp2]
        exponential += [f"fma.rn.f32 OUT, OUT, {scale}, ROW;", exp2]
    lines = [f".reg .pred any; .reg .f32 square, c, c0, c1, c2, e, y<{N}>, t<{N}>;"]
    # coefficients of s in place of x = cap · s, times scale
    lines += [f"mul.f32 square, {cap}, {cap}; mul.f32 c, {cap}, {scale};"]
    lines += [f"mul.f32 c{k}, c, {x:.9e}; mul.f32 c, c, square;" for k, x in enumerate(TANH)]
    lines += [f"abs.f32 y{i}, ${first + i};" for i in range(N)]
    lines += [f"max.f32 y{i % 8}, y{i % 8}, y{i};" for i in range(8, N)]
    lines += [f"max.f32 y{i}, y{i}, y{i + half};" for half in (4, 2, 1) for i in range(half)]
    lines += [
        f"mul.f32 e, y0, {cap}; setp.ge.f32 any, e, 0.45;",
        "vote.sync.any.pred any, any, 0xffffffff; @any bra.uni LARGE;",
    ]
    large = f"bra.uni DONE; LARGE: mul.f32 e, {cap}, {2 * LOG2E.value:.9e};"
    for way, end in ((polynomial, large), (exponential, "DONE:")):
        for start in range(0, N, TOGETHER):
            for line in way:
                for i in range(start, start + TOGETHER):
                    own = line.replace("IN", f"${first + i}").replace("OUT", f"${i}")
                    lines.append(own.replace("ROW", f"${4 * N + i}").replace("#", str(i)))
        lines.append(end)
    return "\n".join(["{", *lines, "}"])


@gluon.jit
def softcapped(s, cap, scale=None, m=None, IN_PLACE: gl.constexpr = False):
    """Return tanh(cap · s), s a matrix product, or exp2(scale · tanh(cap · s) - m).

    Of heads of 64 channels an exponential takes as long as a score's products. So a warp whose
    numbers all are below 0.45 takes a polynomial, others an exponential and a reciprocal, to 2^-22
    of 1. It decides by a branch, as in `rounding_error`.
    """
    N: gl.constexpr = s.shape[0] * s.shape[1] // 128
    PTX: gl.constexpr = _softcapped(N, m is not None, IN_PLACE)
    given = [s, cap] if m is None else [s, cap, scale, (-m)[:, None].broadcast_to(s.shape)]
    operands: gl.constexpr = _operands("=&f", N, 0, (len(given) - IN_PLACE) * N, IN_PLACE)
    return gl.inline_asm_elementwise(PTX, operands, given, gl.float32, True, N)


@gluon.jit
def unpacked_product(x, y):
    """Return x · y in fp32, x in bf16 or fp16. Triton would unpack all of x first, and spill."""
    TYPE: gl.constexpr = "bf16" if x.dtype == gl.bfloat16 else "f16"
    UNPACK: gl.constexpr = f"mov.b32 {{a, b}}, $2; cvt.f32.{TYPE} $0, a; cvt.f32.{TYPE} $1, b;"
    PTX: gl.constexpr = f"{{.reg .b16 a, b; {UNPACK} mul.f32 $0, $0, $3; mul.f32 $1, $1, $4;}}"
    return gl.inline_asm_elementwise(PTX, "=&f,=&f,r,f,f", [x, y], gl.float32, True, 2)


@gluon.jit
def part_buffers(
    dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr,
    D0: gl.constexpr, shared: gl.constexpr, D1: gl.constexpr, shared1: gl.constexpr,
):  # fmt: skip
    """Return shared memory for SLOTS tiles of ROWS tokens, for each part of the channels."""
    buffers = (gl.allocate_shared_memory(dtype, [SLOTS, ROWS, D0], shared),)
    if D1 > 0:
        buffers = (buffers[0], gl.allocate_shared_memory(dtype, [SLOTS, ROWS, D1], shared1))
    return buffers


@gluon.jit
def load_parts(maps, buffers, at, full, b, row, head):
    """Load all parts of the channels of a tile of rows into place `at`, by one map for each."""
    N: gl.constexpr = buffers[0].shape[1]
    for i in gl.static_range(len(buffers)):
        part = buffers[i].index(at).reshape([1, N, 1, buffers[i].shape[2]])
        tma_load(maps[i], [b, row, head, i * buffers[0].shape[2]], full, part)


@gluon.jit
def store_parts(maps, buffers, b, row, head):
    """Store all parts of the channels of a tile of rows."""
    for i in gl.static_range(len(buffers)):
        store_part(maps[i], buffers[i], b, row, head, i * buffers[0].shape[1])


@gluon.jit
def store_part(x, buffer, b, row, head, START: gl.constexpr):
    """Store channels from START on."""
    N: gl.constexpr = buffer.shape[0]
    D: gl.constexpr = buffer.shape[1]
    tma_store(x, [b, row, head, START], buffer.reshape([1, N, 1, D]))


@gluon.jit
def at_index(buffers, i):
    """Place i of the buffers of all parts."""
    return [x.index(i) for x in buffers]


@gluon.jit
def zero_parts(xs):
    """Accumulators of 64 rows, one for each part of the channels of xs."""
    return [zero_product(x.shape[2]) for x in xs]


@gluon.jit
def zero_product(N: gl.constexpr):
    """(64, N) in the layout of a warpgroup's matrix product."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    return gl.zeros([64, N], gl.float32, layout=layout)


@gluon.jit
def register_order(x):
    """x (64, N), a matrix product, as (N / 4, 256) in the order of registers.

    16 bytes of each thread and 512 of each warp are side by side, so that no bank is asked twice.
    """
    # rows: warp, half of its rows, row; columns: group, thread, one of two
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2])
    return x.permute((3, 0, 2, 4, 1, 5)).reshape([N // 4, 256])


@gluon.jit
def start_scores(a, xs, stage, s):
    """Issue a·xᵀ, the sum of the products of all parts; s is zeros."""
    for i in gl.static_range(len(a)):
        x = xs[i].index(stage).permute((1, 0))
        s = warpgroup_mma(a[i], x, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def start_sum(a, xs, stage, acc):
    """Issue acc += a·x, a product for each part."""
    started = (warpgroup_mma(a, xs[0].index(stage), acc[0], is_async=True),)
    if len(acc) == 2:
        a_i = gl.convert_layout(a, gl.DotOperandLayout(0, acc[1].type.layout, 2))
        started = (started[0], warpgroup_mma(a_i, xs[1].index(stage), acc[1], is_async=True))
    return started


@gluon.jit
def finished(xs, OUTSTANDING: gl.constexpr):
    """Return xs, running products and their operands, when at most OUTSTANDING later ones run."""
    done = warpgroup_mma_wait(OUTSTANDING, deps=xs)
    return (done,) if len(xs) == 1 else done


@gluon.jit
def mask_scores(s, start, first, last, before, after, HIDDEN: gl.constexpr = float("-inf")):
    """Return s with HIDDEN in column start + c of row r if that is outside first[r] .. last[r].

    `before` and `after` say whether there may be such columns. A column is 8·e + 2·l + w for the
    thread l of a row's four: e and w are constants in every register, and cost nothing.
    """
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = parts.type.layout
    e = gl.arange(
        0, s.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    )
    l = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    w = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    c = 8 * e[None, :, None, None] + w[None, None, None, :]
    column = start + 2 * l[None, None, :, None]
    if before:
        first_c = gl.convert_layout(first, rows)[:, None, None, None] - column
        parts = gl.where(c >= first_c, parts, HIDDEN)
    if after:
        last_c = gl.convert_layout(last, rows)[:, None, None, None] - column
        parts = gl.where(c <= last_c, parts, HIDDEN)
    return gl.convert_layout(parts.reshape([s.shape[0], s.shape[1]]), s.type.layout)


def exponents(scores: Scores) -> tuple[float, float | None]:
    """Return the factor of (capped) products in the exponent of 2, and `cap` of `softcapped`."""
    assert scores.scale is not None
    if scores.softcap is None:
        return scores.scale * LOG2E.value, None
    return scores.softcap * LOG2E.value, scores.scale / scores.softcap


def split(size: int) -> tuple[int, int]:
    """Return the channels of a head's first part, a power of two, and of its second, or 0."""
    first = 1 << (size.bit_length() - 1)
    return first, size - first


def descriptor(x: Tensor, rows: int, PAD: int, dtype: gl.dtype) -> TensorDescriptor:
    """Return x (B, T, H, D) as a tensor map with boxes of `rows` tokens of one head.

    Past T and D it reads 0 and writes nothing.
    """
    box = (1, rows, 1, PAD)
    layout = shared_layout(box, dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), layout)


def of_bias(scores: Scores, intervals: Intervals, lse: Tensor, BN: int, rows: int) -> list[Tensor]:
    """Return the `padded_reference`, and `rows` for each tile of BN keys, (B, Hq, tiles, rows, BN):
    their biases, then zeros. Return nothing without a key bias.
    """
    if scores.key_bias is None:
        return []
    tiles = pad(scores.key_bias, (0, -scores.key_bias.shape[2] % BN)).unflatten(2, (-1, 1, BN))
    return [padded_reference(lse, scores, intervals), pad(tiles, (0, 0, 0, rows - 1))]


def map_of_rows(x: Tensor, rows: int, N: int, box: int = 1) -> TensorDescriptor:
    """Return `rows` of fp32 numbers as a tensor map of boxes (box, N); past the end it reads 0."""
    T = x.numel() // rows
    return TensorDescriptor(x, [rows, T], [T, 1], [box, N], ROW_LAYOUT)


def addressable(x: Tensor) -> Tensor:
    """Return x, or a copy if a tensor map cannot address it.

    It needs 16-byte alignment, positive strides and contiguous heads.
    """
    b, t, h, d = x.stride()
    bytes_ = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and (b | t | h) * bytes_ % 16 == 0 and min(b, t, h) > 0
    return x if aligned and d == 1 else x.clone(memory_format=torch.contiguous_format)
