"""Launch a kernel again with other addresses, for a fraction of the first launch's time.

`kernel[grid](...)` looks at every argument to find the compiled kernel that serves them: an
attention() forward and backward took 1.6 ms of an H200's host with Triton 3.7.1, with the launches
here 0.7. If shapes, strides, dtypes and alignment match an earlier call, the compiled kernel is
known. The caller's key must cover all four. A CUDA graph (memory.cuda_graphs) spares the rest of
the host's time, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAUNCHES = 512  # that are cached for each kernel; a program rarely has more shapes


class _At(NamedTuple):
    """An address, the one part of a tensor that its descriptor reads."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _mapped(address: int, like: Any) -> Any:
    """Return the descriptor `like` for another address, without the checks of its constructor."""
    x = object.__new__(type(like))
    x.__dict__.update(like.__dict__)
    x.base = _At(address)
    return x


class Relaunch:
    """A compiled kernel, its grid, and its arguments other than addresses."""

    def __init__(self, compiled: Any, programs: int, maps: Sequence[Any], tail: tuple[Any, ...]):
        self.runner: Callable[..., None] = compiled[(programs, 1, 1)]
        self.tail = tail
        # of no tensor: what is cached keeps no memory
        self.likes = [_mapped(0, x) for x in maps if x is not None]
        self.without = (None,) * (len(maps) - len(self.likes))  # maps that this kernel needs not

    def __call__(self, stream: int, mapped: Sequence[int], *addresses: int) -> None:
        """Launch with tensor maps of the addresses `mapped`, then `addresses`, in the kernel's
        order.
        """
        maps = map(_mapped, mapped, self.likes)
        self.runner(*maps, *self.without, *addresses, *self.tail, stream=stream)


def first_launch(
    kernel: Any,
    programs: int,
    maps: Sequence[Any],
    pointers: Sequence[Tensor],
    scalars: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
) -> Relaunch | None:
    """Launch `kernel` in Triton's own way; returns how to do it again, or None if interpreted.

    Its parameters are tensor maps, pointers, scalars and constants, in this order. The last of the
    maps may be None.
    """
    # Triton compiles, or finds the compiled kernel
    compiled = kernel[(programs,)](*maps, *pointers, *scalars, **constants, num_warps=num_warps)
    if compiled is None:
        return None
    names = kernel.arg_names[len(maps) + len(pointers) + len(scalars) :]
    tail = (*scalars, *(constants[name] for name in names))
    return Relaunch(compiled, programs, maps, tail)


def stream_of(device: int) -> int:
    """Return the current stream of a GPU, as a launcher takes it."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
