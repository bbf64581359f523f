"""Launch a kernel again with other addresses, for a fraction of what the first launch takes.

`kernel[grid](...)` looks at every argument to find out which compiled kernel serves them: 50 to 80
µs of host time for thirty arguments with tensor maps. Where shapes, strides, types and alignment
are those of an earlier call, the answer is known. Whoever keeps a `Relaunch` says by its key that
they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 512  # launches that are kept for each kernel; a program rarely has more shapes


def _mapped(base: Tensor, like: Any) -> Any:
    """The tensor descriptor `like`, for another tensor; without the checks of its constructor."""
    x = object.__new__(type(like))
    x.__dict__.update(like.__dict__)
    x.base = base
    return x


class Relaunch:
    """A compiled kernel, its grid and those of its arguments that are not addresses."""

    def __init__(self, runner: Callable[..., None], maps: Sequence[Any], tail: tuple[Any, ...]):
        self.runner, self.tail = runner, tail
        self.maps = [_mapped(None, x) for x in maps]  # type: ignore[arg-type]

    def __call__(self, stream: int, mapped: Sequence[Tensor], *addresses: int) -> None:
        """Launch with tensor maps of `mapped`, then the addresses, in the kernel's order."""
        maps = map(_mapped, mapped, self.maps)
        self.runner(*maps, *addresses, *self.tail, stream=stream)


def first_launch(
    kernel: Any,
    programs: int,
    maps: Sequence[Any],
    pointers: Sequence[Tensor],
    scalars: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
) -> Relaunch | None:
    """Launch `kernel` in Triton's own way; how to do it again, or None in the interpreter.

    Its parameters are tensor maps, pointers, scalars and constants, in this order.
    """
    compiled = kernel[(programs,)](*maps, *pointers, *scalars, **constants, num_warps=num_warps)
    if compiled is None:
        return None
    names = kernel.arg_names[len(maps) + len(pointers) + len(scalars) :]
    tail = (*scalars, *(constants[name] for name in names))
    return Relaunch(compiled[(programs, 1, 1)], maps, tail)


def keep(launches: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Put `value` into `launches`, which never holds more than MOST."""
    if len(launches) >= MOST:
        launches.clear()
    launches[key] = value


def stream_of(x: Tensor) -> int:
    """The current stream of x's GPU, as a launcher takes it."""
    stream: int = torch._C._cuda_getCurrentRawStream(x.get_device())
    return stream


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make x's GPU the current one, if it is not already."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def alignment(*tensors: Tensor) -> tuple[bool, ...]:
    """Whether each address is a multiple of 16 bytes, by which Triton compiles."""
    return tuple([x.data_ptr() % 16 == 0 for x in tensors])
