"""What the Hopper kernels share: barriers and mail between warps, the mask of a tile, tensor maps.

A letter is the number of a program's next tile, -1 after the last: the producer hands tiles out,
and writes to all other warps.
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
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS};\n\tmov.u32 $0, 0;",
        "=r,r",
        [i],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def send(mail, mf, me, done, t):
    """Tell this program's other warps their next tile, -1 after the last; a letter waits until all
    have read the one before last.
    """
    letter: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(me.index(done % 2), ((done // 2) & 1) ^ 1)
    mail.index(done % 2).store(gl.full([1], 0, gl.int32, layout=letter) + t)
    mbarrier.arrive(mf.index(done % 2), count=1)


@gluon.jit
def receive(mail, mf, me, done, WARPS: gl.constexpr):
    """The next tile of this program, -1 after the last, for a reader of so many warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(mf.index(done % 2), (done // 2) & 1)
    t = gl.max(mail.index(done % 2).load(layout), axis=0)
    mbarrier.arrive(me.index(done % 2), count=1)
    return t


@gluon.jit
def hide(s, start, first, last, before, after):
    """s with -inf where row r does not see column start + c, which is before first[r] or after
    last[r].

    `before` and `after`: that there may be such columns. Columns are 8·e + 2·l + w for the thread l
    of a row's four: e and w are constants in every register, and cost nothing.
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
        parts = gl.where(
            c >= gl.convert_layout(first, rows)[:, None, None, None] - column, parts, float("-inf")
        )
    if after:
        parts = gl.where(
            c <= gl.convert_layout(last, rows)[:, None, None, None] - column, parts, float("-inf")
        )
    return gl.convert_layout(parts.reshape([s.shape[0], s.shape[1]]), s.type.layout)


def descriptor(x: Tensor, rows: int, PAD: int, dtype: gl.dtype) -> TensorDescriptor:
    """x (B, T, H, D) as a tensor map with boxes of `rows` tokens of one head; past T and D it reads
    0 and writes nothing.
    """
    box = (1, rows, 1, PAD)
    return TensorDescriptor(
        x, list(x.shape), list(x.stride()), list(box), shared_layout(box, dtype)
    )


def addressable(x: Tensor) -> Tensor:
    """x, copied once if a tensor map cannot address it: 16-byte aligned, positive strides,
    contiguous heads.
    """
    aligned = x.data_ptr() % 16 == 0 and all(
        s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:3]
    )
    return x if aligned and x.stride(3) == 1 else x.clone(memory_format=torch.contiguous_format)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU: one persistent program runs on each."""
    return torch.cuda.get_device_properties(device).multi_processor_count
