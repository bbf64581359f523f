"""Building blocks of the Hopper kernels: named barriers, the tile queue, score masks, tensor maps.

The tile queue has two slots. The producer warp pushes the number of the program's next tile, -1
after the last; every other warp pops it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longctx.kernels.gluon import shared_layout


@gluon.jit
def bar_sync(i, THREADS: gl.constexpr):
    """Wait at named barrier i until THREADS threads have arrived."""
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS};\n\tmov.u32 $0, 0;",
        "=r,r",
        [i],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def bar_arrive(i, THREADS: gl.constexpr):
    """Arrive at named barrier i, for which THREADS threads are counted, without waiting."""
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS};\n\tmov.u32 $0, 0;",
        "=r,r",
        [i],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def push(queue, queue_full, queue_empty, count, t):
    """Put tile t, the count-th of this program, into the queue once its slot has been read."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(queue_empty.index(count % 2), ((count // 2) & 1) ^ 1)
    queue.index(count % 2).store(gl.full([1], 0, gl.int32, layout=one) + t)
    mbarrier.arrive(queue_full.index(count % 2), count=1)


@gluon.jit
def pop(queue, queue_full, queue_empty, count, WARPS: gl.constexpr):
    """The count-th tile of this program, -1 after the last, for a reader of WARPS warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(queue_full.index(count % 2), (count // 2) & 1)
    t = gl.max(queue.index(count % 2).load(layout), axis=0)
    mbarrier.arrive(queue_empty.index(count % 2), count=1)
    return t


def _rounding_error() -> str:
    """PTX of `rounding_error` for the 64 numbers of a thread: of two rows, a pair of each in turn.

    Operands: $0 to $63, the results, of which the first of each row counts; 32 pairs of bf16; 64
    times its row's `plain`; 64 times its row's `limit`.
    """
    lines = [
        ".reg .pred any; .reg .f32 a, b, c, d, low, high;",
        "setp.gt.f32 any, $96, $160; setp.gt.or.f32 any, $98, $162, any;",
        "vote.sync.any.pred any, any, 0xffffffff;",
        "mov.f32 $0, 0f00000000; mov.f32 $2, 0f00000000;",
        "@!any bra.uni DONE;",
        "neg.f32 a, $96; mov.f32 b, 0f00000000; neg.f32 c, $98; mov.f32 d, 0f00000000;",
    ]
    for pair in range(32):
        x, y = "cd" if pair % 2 else "ab"
        lines += [
            f"shl.b32 low, ${64 + pair}, 16; and.b32 high, ${64 + pair}, 0xffff0000;",
            f"add.f32 {x}, {x}, low; add.f32 {y}, {y}, high;",
        ]
    return "\n".join(["{", *lines, "add.f32 $0, a, b; add.f32 $2, c, d;", "DONE:", "}"])


ROUNDING_ERROR = gl.constexpr(_rounding_error())
OPERANDS = gl.constexpr(",".join(["=f"] * 64 + ["r"] * 32 + ["f"] * 128))


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def rounding_error(p16, plain, limit):
    """Row sums of p16 less `plain` (rows, 4), those of p; 0 if no `plain` exceeds its row's limit.

    A warp decides for all its rows, by a branch, so that it costs next to nothing where the answer
    is no. Triton has no such branch. p16 is (64, 128) bf16, an operand of a product.
    """
    gl.static_assert(p16.shape[0] == 64 and p16.shape[1] == 128 and p16.dtype == gl.bfloat16)
    layout: gl.constexpr = p16.type.layout
    parts: gl.constexpr = p16.reshape([64, 16, 4, 2]).type.layout
    sums: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts))
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts)))
    plain_ = gl.convert_layout(plain, sums)[:, None, :, None].broadcast_to([64, 16, 4, 2])
    limit_ = gl.convert_layout(limit, rows)[:, None, None, None]
    limit_ = limit_.broadcast_to([64, 16, 4, 2])
    error = gl.inline_asm_elementwise(
        ROUNDING_ERROR,
        OPERANDS,
        [
            p16,
            gl.convert_layout(plain_.reshape([64, 128]), layout),
            gl.convert_layout(limit_.reshape([64, 128]), layout),
        ],
        dtype=gl.float32,
        is_pure=True,
        pack=64,
    )
    error = gl.reduce(gl.reduce(error.reshape([64, 16, 4, 2]), 3, _first), 1, _first)
    return gl.convert_layout(error, plain.type.layout)


@gluon.jit
def mask_scores(s, start, first, last, before, after):
    """s with -inf where column start + c is before first[r] or after last[r] of row r.

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
        parts = gl.where(c >= first_c, parts, float("-inf"))
    if after:
        last_c = gl.convert_layout(last, rows)[:, None, None, None] - column
        parts = gl.where(c <= last_c, parts, float("-inf"))
    return gl.convert_layout(parts.reshape([s.shape[0], s.shape[1]]), s.type.layout)


def descriptor(x: Tensor, rows: int, PAD: int, dtype: gl.dtype) -> TensorDescriptor:
    """x (B, T, H, D) as a tensor map whose boxes are `rows` tokens of one head.

    Past T and D it reads 0 and writes nothing.
    """
    box = (1, rows, 1, PAD)
    layout = shared_layout(box, dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), layout)


def addressable(x: Tensor) -> Tensor:
    """x, copied once if a tensor map cannot address it.

    It needs 16-byte alignment, positive strides and contiguous heads.
    """
    b, t, h, d = x.stride()
    bytes_ = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and (b | t | h) * bytes_ % 16 == 0 and min(b, t, h) > 0
    return x if aligned and d == 1 else x.clone(memory_format=torch.contiguous_format)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU: one persistent program runs on each."""
    return torch.cuda.get_device_properties(device).multi_processor_count
