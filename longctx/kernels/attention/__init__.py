"""Kernels of attention: portable Triton, Hopper, tiles for a CPU, decoding, and their self-test.

Every implementation has a module, or two, with these functions:

    forward(q, k, v, intervals, scale, softcap) → out, lse
    backward(do, dlse, saved, intervals, scale, softcap) → dq, dk, dv

`dlse` is None if nothing depends on the lse, `softcap` if scores are not capped.
"""

from typing import NamedTuple

from torch import Tensor


class Intervals(NamedTuple):
    """Keys that each query sees, and the transpose, int32; both ends are included.

    `first`, `last` are (B or 1, Tq), `qfirst`, `qlast` (B or 1, Tk).
    """

    first: Tensor
    last: Tensor
    qfirst: Tensor
    qlast: Tensor


class Saved(NamedTuple):
    """What a forward saves for its backward: q, out (B, Tq, Hq, D), k, v (B, Tk, Hkv, D), lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor  # (B, Hq, Tq) float32, natural log
