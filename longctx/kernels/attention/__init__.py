"""Kernels of attention: portable Triton, Ampere, Hopper, tiles for a CPU, decoding, self-test.

Every implementation has a module, or two, with these functions:

    forward(q, k, v, intervals, scores) → out, lse
    backward(do, dlse, saved, intervals, scores) → dq, dk, dv, dsinks, dkey_bias

`dlse` is None if nothing depends on the lse, `dsinks` if there are no sinks, `dkey_bias` likewise.
With a key bias every lse is relative (key_bias.py). `IMPLEMENTATIONS` says where each runs and what
it takes: choice, refusals, kernel lock and planner read it, so a kernel for another chip is its
files and a row.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # planning reads the sizes, and needs no torch
    from torch import Tensor

SHORT = 1024  # keys of a window or a row, up to half of which small tiles are faster
HOPPER_SIZES = (64, 96, 128, 192, 256)  # to the next of which Hopper's kernels pad a head


def hopper_size(head_dim: int) -> int:
    """Return the head size as which Hopper's kernels compute heads of `head_dim`."""
    return next(size for size in HOPPER_SIZES if size >= head_dim)


class Intervals(NamedTuple):
    """Keys that each query sees, and the transpose, int32; both ends are included.

    `first`, `last` are (B or 1, Tq), `qfirst`, `qlast` (B or 1, Tk). `span` is "short" for windows
    of up to SHORT / 2 keys, "medium" up to SHORT, else "packed" for documents, "window", "brief"
    for up to SHORT keys, or "long". Tiles and their order are chosen by it; results do not depend
    on it.
    `starts` of "packed" are `launch.tile_starts`, of others any tensor.
    """

    first: Tensor
    last: Tensor
    qfirst: Tensor
    qlast: Tensor
    span: str = "long"
    starts: Any = None


class Saved(NamedTuple):
    """Tensors that a forward saves for its backward: q, out (B, Tq, Hq, D), k, v (B, Tk, Hkv, D),
    lse.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor  # (B, Hq, Tq) float32, natural log


class Scores(NamedTuple):
    """How the product of a query and a key becomes a logit of the softmax, and what joins it.

    A new part is a field here, a line in naive and one in each kernel of flash. Other backends
    refuse it, since their description does not name it.
    """

    scale: float | None = None  # factor of the product; None: D**-0.5
    softcap: float | None = None  # c: logits become c · tanh(logit / c)
    sinks: Tensor | None = None  # (Hq,) float32, a logit of each head without a value
    key_bias: Tensor | None = None  # (B, Hq, Tk) float32, of strides (any, Tk, 1)

    @property
    def parts(self) -> frozenset[str]:
        """Return the names of the parts that not every backend has."""
        return frozenset(x for x in self._fields[1:] if getattr(self, x) is not None)

    def of_heads(self, start: int, count: int) -> Scores:
        """Return the scores of `count` query heads from `start` on."""
        sinks, bias = self.sinks, self.key_bias
        # a slice of all heads would cost a copy in backward
        if sinks is not None and sinks.shape[0] != count:
            sinks = sinks[start : start + count]
        if bias is not None and bias.shape[1] != count:
            bias = bias[:, start : start + count]
        return Scores(self.scale, self.softcap, sinks, bias)


ALL_SCORES = frozenset(Scores._fields[1:])


class Gradients(NamedTuple):
    """Gradients of an attention call: like q, k, v, and like sinks and key bias if it has them."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None
    dkey_bias: Tensor | None = None


class Implementation(NamedTuple):
    """An implementation of both passes: its modules here, and the tensors that it serves."""

    modules: tuple[str, str]  # of forward and backward
    files: tuple[str, ...]  # patterns of its sources, whose hashes the kernel lock holds
    head_sizes: Sequence[int] = range(16, 513)
    gpus: str = "a GPU"  # that run it, in words
    generations: Container[int] | None = None  # of those of NVIDIA, 8 for sm_8x; None: any device
    chosen_on: Container[int] = ()  # generations for which kernel=auto takes it
    itemsizes: tuple[int, ...] = (2, 4)  # bytes of an element
    is_ordered: bool = True  # dq, too, has the same bits in every run
    sums_dq: bool = False  # in fp32, in memory of its own

    @property
    def reproducible(self) -> tuple[str, ...]:
        """Return the results that have the same bits in every run on one machine."""
        return ("out", "dq", "dk", "dv") if self.is_ordered else ("out", "dk", "dv")

    def takes(self, itemsize: int, head_dim: int) -> bool:
        """Return True if it computes such elements and heads."""
        return itemsize in self.itemsizes and head_dim in self.head_sizes


_AMPERE = Implementation(
    modules=("ampere", "ampere"),
    files=("ampere.py", "portable.py"),
    head_sizes=(64, 96, 128, 256),
    gpus="an NVIDIA GPU from sm_80 on",
    generations=range(8, 100),
    chosen_on=(8, 12),  # sm_100 has products of its own, which Triton's compiler uses
    itemsizes=(2,),
    is_ordered=False,
)
_HOPPER = Implementation(
    modules=("hopper_forward", "hopper_backward"),
    files=("hopper_*.py", "portable.py"),
    head_sizes=range(64, 257, 8),
    gpus="a Hopper GPU",
    generations=(9,),
    chosen_on=(9,),
    itemsizes=(2,),
    is_ordered=False,
    sums_dq=True,
)
# In the order in which kernel=auto looks for one. "-ordered" serves deterministic algorithms.
IMPLEMENTATIONS = {
    "triton-hopper": _HOPPER,
    "triton-hopper-ordered": _HOPPER._replace(is_ordered=True),
    "triton-ampere": _AMPERE,
    "triton-ampere-ordered": _AMPERE._replace(modules=("ampere", "portable"), is_ordered=True),
    "triton-portable": Implementation(("portable", "portable"), ("portable.py",)),
    "torch-tiled": Implementation(("tiled", "tiled"), ("tiled.py",), head_sizes=range(1, 1 << 31)),
}
