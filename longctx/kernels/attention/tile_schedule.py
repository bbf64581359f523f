"""Which tiles a program goes through, and in which order programs take tiles.

Shared by the portable and the Hopper kernels. Intervals are non-decreasing, so the tiles of keys
that a tile of queries sees (or, transposed, the tiles of queries that see a tile of keys) are one
range: lo .. full_lo-1 need the mask, full_lo .. full_hi-1 are seen entirely and need none, and
full_hi .. need it again. Four scalars, from both ends of the tile, say where each part begins.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

L2_BYTES = 32 << 20  # of the cache, for the tiles that the heads of a group load again and again


@triton.jit
def scheduled_tile(t, tiles, heads, l2_heads):
    """The t-th tile of the schedule: (rank, head).

    Heads are taken in groups of `l2_heads`, whose operands fit into L2 together; in a group the
    longest tiles come first.
    """
    group = t // (tiles * l2_heads)
    size = tl.minimum(l2_heads, heads - group * l2_heads)
    in_group = t - group * tiles * l2_heads
    return in_group // size, group * l2_heads + in_group % size


@triton.jit
def visible_tiles(first, last, start, end, SIZE: tl.constexpr):
    """Tiles of SIZE that positions start .. end-1 see: (lo, full_lo, full_hi, masked).

    Tiles full_lo .. full_hi-1 need no mask; `masked` counts those before and after that do.
    """
    first_lo, first_hi = tl.load(first + start), tl.load(first + end - 1)
    last_lo, last_hi = tl.load(last + start), tl.load(last + end - 1)
    lo = first_lo // SIZE
    hi = tl.maximum(tl.cdiv(last_hi + 1, SIZE), lo)
    full_lo = tl.cdiv(first_hi, SIZE)
    full_hi = (last_lo + 1) // SIZE
    full_lo = tl.where(full_hi > full_lo, full_lo, hi)
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, full_lo - lo + tl.maximum(hi - full_hi, 0)


@triton.jit
def masked_tile(t, lo, full_lo, full_hi):
    """The t-th of the tiles that need the mask: those before full_lo, then those from full_hi."""
    return tl.where(t < full_lo - lo, lo + t, full_hi + t - (full_lo - lo))


def batch_stride(interval: Tensor) -> int:
    """Distance between the rows of intervals (B or 1, T); 0 where one stands for all."""
    return interval.stride(0) if interval.shape[0] > 1 else 0


def heads_in_l2(x: Tensor, heads: int, multiple: int) -> int:
    """How many heads, a multiple of `multiple`, have two operands like x that fill L2_BYTES."""
    per_head = 2 * x.shape[1] * x.shape[3] * x.element_size()
    return min(heads, max(1, L2_BYTES // per_head) * multiple)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; a CPU, which interprets the kernels, counts as four."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
