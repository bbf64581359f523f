"""Launch a kernel again with other addresses, for a fraction of the first launch's time.

`kernel[grid](...)` looks at every argument to find the compiled kernel that serves them, and makes
every tensor map anew: an attention() forward and backward took 1.6 ms of an H200's host with Triton
3.7.1. If shapes, strides, dtypes and alignment match an earlier call, the compiled kernel is known,
and a tensor map is a function of the address. The caller's key must cover all four.

Launches call the C function below Triton's launcher. AMD's GPUs, hooks of profilers and untried
versions get the launcher itself (`runner`). A CUDA graph (memory.cuda_graphs) spares the rest of
the host's time, too.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from longctx.kernels import TRITON

LAUNCHES = 512  # that are cached for each kernel; a program rarely has more shapes
TENSOR_MAPS = 1 << 12  # sets of half a KB a map, that are cached for all kernels


def _mapped(address: int, like: Any) -> Any:
    """Return the descriptor `like` for another address, without the checks of its constructor."""
    x = object.__new__(type(like))
    x.__dict__.update(like.__dict__)
    x.base = SimpleNamespace(data_ptr=lambda: address)  # the one part of a tensor that it reads
    return x


class Relaunch:
    """A compiled kernel, its grid, and its arguments other than addresses."""

    launch: Callable[..., None] | None = None  # the C function, if it is known

    def __init__(self, compiled: Any, programs: int, maps: Sequence[Any], tail: tuple[Any, ...]):
        self.grid = programs, 1, 1
        self.runner: Callable[..., None] = compiled[self.grid]
        self.tail = tail
        # of no tensor: what is cached keeps no memory
        self.likes = [_mapped(0, x) for x in maps if x is not None]
        self.is_there = [x is not None for x in maps]  # this kernel needs no others
        run = getattr(compiled, "run", None)
        if type(run).__name__ == "CudaLauncher":
            self._find_launch(compiled, run)

    def _find_launch(self, compiled: Any, run: Any) -> None:
        """Set the C function below Triton's launcher `run`, and what it takes."""
        import triton  # a machine without it imports this module
        from triton.backends.nvidia import driver

        # a launch would allocate the scratch memory
        has_scratch = run.global_scratch_size or run.profile_scratch_size
        if has_scratch or not triton.__version__.startswith(TRITON):
            return
        # functions that profilers have called at launches, now or later
        runtime = triton.knobs.runtime
        self.hooks = runtime.launch_enter_hook.calls, runtime.launch_exit_hook.calls
        self.make_map = driver.make_tensordesc_arg
        self.geometries: list[Any] = getattr(compiled.metadata, "tensordesc_meta", None) or []
        # arguments between the stream and the kernel's own: what `run` gives for a kernel of none
        given: list[Any] = []
        spy = copy.copy(run)
        spy.launch = lambda *arguments: given.extend(arguments[4:])
        spy(*self.grid, 0, compiled.function, compiled.packed_metadata, None, None, None)
        self.in_list = given[-1] == ()  # Triton 3.7 takes the kernel's own as one list
        self.head = given[:-1] if self.in_list else given
        # a Python function around it makes tensor maps
        inner = inspect.getclosurevars(run.launch).nonlocals if self.likes else {}
        self.launch = inner.get("launcher", run.launch)

    def __call__(self, stream: int, mapped: tuple[int, ...], *addresses: int) -> None:
        """Launch with tensor maps of the addresses `mapped`, then `addresses`, in the kernel's
        order.
        """
        if self.launch is None or any(self.hooks):
            likes = map(_mapped, mapped, self.likes)
            maps = [next(likes) if there else None for there in self.is_there]
            self.runner(*maps, *addresses, *self.tail, stream=stream)
            return
        own = [*_tensor_maps(self, mapped), *addresses, *self.tail]
        self.launch(*self.grid, stream, *self.head, *([own] if self.in_list else own))


@functools.lru_cache(maxsize=TENSOR_MAPS)
def _tensor_maps(of: Relaunch, mapped: tuple[int, ...]) -> list[Any]:
    """Return the tensor maps of a launch for these addresses, as the C function takes them.

    They hold addresses and geometries, no memory: they are right for whatever is there later.
    """
    own = zip(mapped, of.likes, of.geometries, strict=False)
    made = (of.make_map(_mapped(address, like), geometry) for address, like, geometry in own)
    return [x for there in of.is_there for x in (next(made) if there else (None,))]


def first_launch(
    kernel: Any,
    programs: int,
    maps: Sequence[Any],
    pointers: Sequence[Tensor],
    scalars: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
) -> Relaunch | None:
    """Launch `kernel` in Triton's own way; returns how to do it again, or None if interpreted."""
    # Its parameters are maps, pointers, scalars, constants. Maps and scalars may be None.
    # Triton compiles, or finds the compiled kernel
    compiled = kernel[(programs,)](*maps, *pointers, *scalars, **constants, num_warps=num_warps)
    if compiled is None:
        return None
    names = kernel.arg_names[len(maps) + len(pointers) + len(scalars) :]
    tail = (*scalars, *(constants[name] for name in names))
    return Relaunch(compiled, programs, maps, tail)


def stream_of(device: int) -> int:
    """Return the current stream of a GPU, as a launcher takes it."""
    return int(torch._C._cuda_getCurrentRawStream(device))
