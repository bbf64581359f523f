"""Eight-bit copies of a matrix x (R, C) for the tensor cores, as it lies and transposed.

    scale = max |x| / m,   q = clamp(x · (1 / scale), -m, m), rounded to nearest even

m is the largest number of the format: 448 of e4m3, 57,344 of e5m2 (arXiv 2209.05433). A product of
eight-bit matrices needs both with the summed dimension last in memory. So the activations, weights
and gradients of a linear layer, each in two products, are needed both ways, and one kernel reads x
once and writes both. The transposed copy's rows are padded with zeros to a multiple of 16, which
the product requires.

A tensor that holds inf or NaN has scale NaN, and so all products of it are NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a tile of amax_kernel, tiles of a program, and its warps: 4.2 TB/s on one H200
REDUCED, TILES, REDUCING = 8192, 8, 8
TILE, WARPS = (32, 128), 4  # rows and columns of a tile of quantize_kernel: 3.5 TB/s
LEAST = tl.constexpr(1e-30)  # for max |x| of zeros: neither its scale nor 1 / scale is inf


@triton.jit
def amax_kernel(x, amax, numel, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Raise `amax` to the largest |x| of TILES tiles of BLOCK elements; NaN counts as inf."""
    start, most = tl.program_id(0).to(tl.int64) * BLOCK * TILES, tl.zeros([BLOCK], tl.float32)
    for tile in range(TILES):
        at = start + tile * BLOCK + tl.arange(0, BLOCK)
        # NaN would be lost in a maximum: it counts as inf
        size = tl.abs(tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32))
        most = tl.maximum(most, tl.where(size == size, size, float("inf")))
    # a maximum is the same in any order
    tl.atomic_max(amax, tl.max(most, 0))


@triton.jit
def unit_of(amax, scale, LARGEST: tl.constexpr, SCALED: tl.constexpr):
    """Return the given scale if SCALED, else that of the largest |x|, read anew by each call."""
    if SCALED:
        unit = tl.load(scale, volatile=True)
    else:
        # volatile: the compiler must not share one rounding between both copies
        most = tl.maximum(tl.load(amax, volatile=True), LEAST)
        unit = tl.div_rn(tl.where(most < float("inf"), most, float("nan")), LARGEST)
    return unit


@triton.jit
def rounded(value, unit, LARGEST: tl.constexpr, to):
    """Return value / unit, clamped, in the format of the pointer `to`."""
    value = value.to(tl.float32) * tl.div_rn(1.0, unit)
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    return value.to(to.dtype.element_ty)


# A constant R = 1 makes the compiler write registers that nothing has set into the padding
@triton.jit(do_not_specialize=["R"])
def quantize_kernel(
    x, amax, rows, columns, scale, R, C, padded, LARGEST: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write a tile (BR, BC) of the copy `rows` (R, C) if ROWS, and of the transposed copy `columns`
    (C, padded) if COLUMNS. The scale is given if SCALED; one program writes it.
    """
    # one axis of programs: a grid's second has 65,535 at most, which 2 million rows exceed
    tile, tiles = tl.program_id(0), tl.cdiv(C, BC)
    r = (tile // tiles).to(tl.int64) * BR + tl.arange(0, BR)
    c = (tile % tiles) * BC + tl.arange(0, BC)
    # Each copy is rounded by itself, with a scale of its own to the compiler. If one rounding
    # served both, ptxas before 13 would store bytes before they are computed (triton-
    # lang/triton#11111).
    unit = unit_of(amax, scale, LARGEST, SCALED)
    # all programs compute the same scale; one writes it
    if tile == 0:
        tl.store(scale, unit)
    inside = (r < R)[:, None] & (c < C)[None, :]
    value = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0.0)
    if ROWS:
        q = rounded(value, unit, LARGEST, rows)
        tl.store(rows + r[:, None] * C + c[None, :], q, mask=inside)
    if COLUMNS:
        q = rounded(value.T, unit_of(amax, scale, LARGEST, SCALED), LARGEST, columns)
        # zeros pad the transposed rows, as the product requires
        to = columns + c[:, None].to(tl.int64) * padded + r[None, :]
        tl.store(to, q, mask=(c < C)[:, None] & (r < padded)[None, :])


def padded(R: int) -> int:
    """Return the columns of the transposed copy of R rows."""
    return -(-R // 16) * 16


@torch.library.custom_op("longctx::quantize", mutates_args=())
def quantize(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (R, C), contiguous, as (R, C) and transposed (C, padded R) in `dtype`, and the
    scale.

    The scale () is given, or x's own. A copy is empty unless it is asked for.
    """
    R, C = x.shape
    outputs = _outputs(x, scale, dtype, rows, columns)
    with torch.cuda.device_of(x):
        amax = x.new_zeros((), dtype=torch.float32)
        # a given scale spares the pass for the largest number
        if scale is not None:
            outputs[2].copy_(scale)
        else:
            programs = triton.cdiv(x.numel(), REDUCED * TILES)
            amax_kernel[(programs,)](x, amax, x.numel(), REDUCED, TILES, num_warps=REDUCING)
        programs = triton.cdiv(C, TILE[1]) * triton.cdiv(padded(R), TILE[0])
        quantize_kernel[(programs,)](
            x, amax, *outputs, R, C, padded(R),
            torch.finfo(dtype).max, scale is not None, rows, columns, *TILE, num_warps=WARPS,
        )  # fmt: skip
    return outputs


@quantize.register_fake
def _outputs(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    R, C = x.shape
    return (
        x.new_empty((R, C) if rows else (0,), dtype=dtype),
        x.new_empty((C, padded(R)) if columns else (0,), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )
