"""Kernels of attention: portable Triton, Ampere, Hopper, tiles for a CPU, decoding, self-test.

Every implementation has a module, or two, with these functions:

    forward(q, k, v, intervals, scale, softcap) → out, lse
    backward(do, dlse, saved, intervals, scale, softcap) → dq, dk, dv

`dlse` is None if nothing depends on the lse, `softcap` if scores are not capped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # planning reads the sizes, and needs no torch
    from torch import Tensor

HEAD_SIZES = range(16, 513)  # that the Triton kernels compute
HOPPER_HEAD_SIZES = range(64, 257, 8)  # that Hopper's take, padded to the next of HOPPER_SIZES
AMPERE_HEAD_SIZES = (64, 96, 128, 256)  # that the kernels for mma.sync take
HOPPER_SIZES = (64, 96, 128, 192, 256)


def hopper_size(head_dim: int) -> int:
    """Return the head size as which Hopper's kernels compute heads of `head_dim`."""
    return next(size for size in HOPPER_SIZES if size >= head_dim)


class Intervals(NamedTuple):
    """Keys that each query sees, and the transpose, int32; both ends are included.

    `first`, `last` are (B or 1, Tq), `qfirst`, `qlast` (B or 1, Tk).
    """

    first: Tensor
    last: Tensor
    qfirst: Tensor
    qlast: Tensor


class Saved(NamedTuple):
    """Tensors that a forward saves for its backward: q, out (B, Tq, Hq, D), k, v (B, Tk, Hkv, D),
    lse.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor  # (B, Hq, Tq) float32, natural log
