"""Which tiles a program walks over, and in which order programs take them: shared by the portable
and the Hopper kernels.

Intervals are non-decreasing, so the tiles that a tile of queries (or, transposed, of keys) sees are
one run: a boundary that needs the mask, tiles seen as a whole, another boundary. Four scalars from
the ends of the tile say where each begins.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

L2_BYTES = 32 << 20  # of the cache, for what the heads of a group walk over


@triton.jit
def place(t, tiles, heads, together):
    """The t-th of all tiles: (rank, head). Heads walk in groups that share L2; in a group the
    longest tiles come first.
    """
    group = t // (tiles * together)
    size = tl.minimum(together, heads - group * together)
    rest = t - group * tiles * together
    return rest // size, group * together + rest % size


@triton.jit
def walk(first, last, start, end, SIZE: tl.constexpr):
    """Tiles that positions start .. end-1 see: (lo, full_lo, full_hi, masked), full_lo .. full_hi-1
    seen as a whole.
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
def boundary(t, lo, full_lo, full_hi):
    """The t-th of the tiles that need the mask: those before full_lo, then those from full_hi."""
    return tl.where(t < full_lo - lo, lo + t, full_hi + t - (full_lo - lo))


def batch_stride(interval: Tensor) -> int:
    """Distance between the rows of intervals (B or 1, T); 0 where one stands for all."""
    return interval.stride(0) if interval.shape[0] > 1 else 0


def heads_together(x: Tensor, heads: int, multiple: int) -> int:
    """How many heads, a multiple of a group, walk side by side: those whose two walked operands,
    like x, fill L2_BYTES.
    """
    per_head = 2 * x.shape[1] * x.shape[3] * x.element_size()
    return min(heads, max(1, L2_BYTES // per_head) * multiple)
