"""Launch a kernel again with other addresses, for a fraction of the first launch's time.

`kernel[grid](...)` looks at every argument to find the compiled kernel that serves them, and makes
every tensor map anew: 50 to 80 µs of host time for thirty arguments. If shapes, strides, dtypes and
alignment match an earlier call, the compiled kernel is known, and a tensor map is a function of the
address alone. The caller's key must cover all four.

With Triton 3.6 the C function below its launcher is called. Other versions call their own `runner`,
which takes about 15 µs more. A CUDA graph (memory.cuda_graphs) spares both.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAUNCHES = 512  # that are cached for each kernel; a program rarely has more shapes
TENSOR_MAPS = 1 << 15  # of half a KB, that are cached for all kernels
KNOWN_TRITON = "3.6."  # whose launcher takes the arguments of `_direct_launcher`


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


@dataclass(frozen=True, eq=False)
class MapMaker:
    """Makes the tensor maps of one argument, as the C launcher takes them; a key of their cache."""

    like: Any  # a descriptor of the same geometry
    make: Callable[..., list[Any]]  # (descriptor, metadata) → tensor map, shape, strides
    metadata: Any


@functools.lru_cache(maxsize=TENSOR_MAPS)
def tensor_map(maker: MapMaker, address: int) -> tuple[Any, ...]:
    """Return the tensor map of `address`.

    A map holds an address and a geometry, no memory: it is right for whatever lies there later.
    """
    return tuple(maker.make(_mapped(address, maker.like), maker.metadata))


class _Direct(NamedTuple):
    """The C function that launches a compiled kernel, and its arguments."""

    launch: Callable[..., None]
    fixed: tuple[Any, ...]  # between the stream and the kernel's own arguments
    makers: list[MapMaker]
    # lists of functions that profilers of Triton have called at launches, now or later
    hooks: tuple[list[Any], ...]


class Relaunch:
    """A compiled kernel, its grid, and its arguments other than addresses."""

    def __init__(self, compiled: Any, programs: int, maps: Sequence[Any], tail: tuple[Any, ...]):
        self.compiled, self.grid, self.tail = compiled, (programs, 1, 1), tail
        self.likes = [_mapped(0, x) for x in maps if x is not None]
        self.without = (None,) * (len(maps) - len(self.likes))  # maps that this kernel needs not
        self.runner: Callable[..., None] | None = None
        self.direct: _Direct | None = None

    def __call__(self, stream: int, mapped: Sequence[int], *addresses: int) -> None:
        """Launch with tensor maps of the addresses `mapped`, then `addresses`, in the kernel's
        order.
        """
        # the first call finds the launcher; it needs the driver's context
        if self.runner is None:
            # in this order: another thread may launch meanwhile
            self.direct = _direct_launcher(self.compiled, self.likes)
            self.runner = self.compiled[self.grid]
        direct = self.direct
        maps: list[Any] = []
        if direct is None or any(direct.hooks):
            maps = [*map(_mapped, mapped, self.likes), *self.without]
            assert self.runner is not None
            self.runner(*maps, *addresses, *self.tail, stream=stream)
            return
        # maps of known addresses come from a cache
        for maker, address in zip(direct.makers, mapped, strict=True):
            maps += tensor_map(maker, address)
        direct.launch(
            *self.grid, stream, *direct.fixed, *maps, *self.without, *addresses, *self.tail
        )


def _direct_launcher(compiled: Any, likes: Sequence[Any]) -> _Direct | None:
    """Return the C function below the launcher of Triton 3.6 on an NVIDIA GPU, None for others."""
    import triton
    from triton import knobs
    from triton.backends.nvidia import driver

    run = compiled.run
    if not triton.__version__.startswith(KNOWN_TRITON) or type(run) is not driver.CudaLauncher:
        return None
    launch, metadata = run.launch, []
    if likes:
        # a Python function makes the tensor maps; the C function below it takes them ready-made
        inner = inspect.getclosurevars(launch).nonlocals
        launch, metadata = inner["launcher"], inner["tensordesc_meta"]
    assert not run.global_scratch_size and not run.profile_scratch_size
    assert driver._BASE_ARGS_FORMAT == "iiiKKppOOOOOO"
    # None: global scratch, profile scratch; then launch metadata and its hooks
    fixed = (
        *(compiled.function, run.launch_cooperative_grid, run.launch_pdl),
        *(None, None, compiled.packed_metadata, None, None, None),
    )
    makers = [
        MapMaker(like, driver.make_tensordesc_arg, each)
        for like, each in zip(likes, metadata, strict=True)
    ]
    hooks = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    return _Direct(launch, fixed, makers, hooks)


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


def compile_side_by_side(
    kernel: Any,
    programs: int,
    calls: Sequence[tuple[Sequence[Any], dict[str, Any]]],
    num_warps: int,
) -> None:
    """Compile `kernel` for each of the `calls`, its arguments and constants, in threads: Triton
    holds the interpreter's lock only part of the time.
    """
    device = torch.cuda.current_device()

    def compiled(arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        with torch.cuda.device(device):  # threads begin with the first
            kernel.warmup(*arguments, grid=(programs,), **constants, num_warps=num_warps)

    with ThreadPoolExecutor(len(calls)) as pool:
        for compiling in [pool.submit(compiled, *call) for call in calls]:
            compiling.result()


@functools.cache
def load_one_at_a_time() -> None:
    """Make threads take turns when Triton loads a kernel; call it before they start.

    Triton 3.6 builds an extension module for the launcher of each kernel, and gives all of them one
    name. CPython keeps one module object per name, so two threads that load launchers at the same
    time can both get the same one.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    _ = driver.active  # loads a module, too
    load, turn = CompiledKernel._init_handles, threading.Lock()

    def load_in_turn(kernel: Any) -> None:
        with turn:
            try:
                load(kernel)
            finally:
                # else the next call would launch a kernel that is not on the GPU
                if kernel.module is None:
                    kernel._run = None

    CompiledKernel._init_handles = load_in_turn


def keep(launches: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Put `value` into `launches`, which never holds more than LAUNCHES."""
    # dropping all is rare, and simpler than an order of use
    if len(launches) >= LAUNCHES:
        launches.clear()
    launches[key] = value


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make x's GPU the current one, if it is not already."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def stream_of(device: int) -> int:
    """Return the current stream of a GPU, as a launcher takes it."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def zero(x: Tensor, count: int, stream: int) -> None:
    """Make the first `count` 32-bit values of x, which has 4-byte values, zero on `stream`.

    torch's own takes several times as long to ask for it.
    """
    # in a thread that has no CUDA context yet the driver refuses; torch makes one
    if _memset()(x.data_ptr(), 0, count, stream):
        x[:count].zero_()


@functools.cache
def _memset() -> Callable[..., int]:
    function = ctypes.CDLL("libcuda.so.1").cuMemsetD32Async
    function.argtypes = ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
    function.restype = ctypes.c_int
    return function
