"""Launch a kernel again with other addresses, for a fraction of what the first launch takes.

`kernel[grid](...)` looks at every argument to find out which compiled kernel serves them, and makes
every tensor map anew: 50 to 80 µs of host time for thirty arguments. Where shapes, strides, types
and alignment are those of an earlier call, the answer is known, and a tensor map is a function of
the address alone. Whoever keeps a `Relaunch` says by its key that they are.

With Triton 3.6, whose launcher is known, the C function below it is called. Any other version has
its own `runner` called, which takes about 15 µs more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST = 512  # launches that are kept for each kernel; a program rarely has more shapes
# tensor maps, of half a KB: an argument of a deep model has one for each layer, and more
MOST_ADDRESSES = 256
MOST_MAPS = 1 << 15  # of all arguments of all kernels; counted after each 1,024 new ones
KNOWN_TRITON = "3.6."  # whose launcher takes what `_c_launcher_of_36` says

_log = logging.getLogger(__name__)
_every: list[weakref.ref[TensorMaps]] = []
_made = itertools.count(1)


class _At(NamedTuple):
    """What a tensor descriptor needs to know of a tensor: its address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _mapped(address: int, like: Any) -> Any:
    """The tensor descriptor `like`, for another address; without the checks of its constructor."""
    x = object.__new__(type(like))
    x.__dict__.update(like.__dict__)
    x.base = _At(address)
    return x


class TensorMaps(dict[int, tuple[Any, ...]]):
    """The tensor maps of one argument by address, as the C launcher takes them.

    A map holds an address and a geometry, no memory: it is right for whatever lies there later.
    """

    def __init__(self, like: Any, make: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        self.like, self.make = like, make
        _every.append(weakref.ref(self))

    def __missing__(self, address: int) -> tuple[Any, ...]:
        if len(self) >= MOST_ADDRESSES:
            self.clear()
        if next(_made) % 1024 == 0:
            _forget_if_many()
        made = self[address] = tuple(self.make(_mapped(address, self.like)))
        return made


def _forget_if_many() -> None:
    alive = [x for ref in _every if (x := ref()) is not None]
    _every[:] = map(weakref.ref, alive)
    if sum(map(len, alive)) >= MOST_MAPS:
        for x in alive:
            x.clear()


class _Direct(NamedTuple):
    """The C function that launches a compiled kernel, and what it takes."""

    launch: Callable[..., None]
    fixed: tuple[Any, ...]  # between the stream and the kernel's own arguments
    make: Callable[..., list[Any]]  # (descriptor, metadata) → tensor map, shape, strides
    metadata: Sequence[Any]  # of each tensor map
    # what profilers of Triton have asked to be called at launches, now or later
    hooks: tuple[list[Any], ...]


class Relaunch:
    """A compiled kernel, its grid and those of its arguments that are not addresses."""

    def __init__(self, compiled: Any, programs: int, maps: Sequence[Any], tail: tuple[Any, ...]):
        self.compiled, self.grid, self.tail = compiled, (programs, 1, 1), tail
        self.likes = [_mapped(0, x) for x in maps if x is not None]
        self.without = (None,) * (len(maps) - len(self.likes))  # maps that this kernel needs not
        self.runner: Callable[..., None] | None = None
        self.direct: _Direct | None = None
        self.maps: list[TensorMaps] = []

    def __call__(self, stream: int, mapped: Sequence[int], *addresses: int) -> None:
        """Launch with tensor maps of the addresses `mapped`, then `addresses`, in the kernel's
        order.
        """
        if self.runner is None:
            self._prepare()
        direct = self.direct
        maps: list[Any]
        if direct is None or any(direct.hooks):
            assert self.runner is not None
            maps = [*map(_mapped, mapped, self.likes), *self.without]
            self.runner(*maps, *addresses, *self.tail, stream=stream)
            return
        maps = []
        for by_address, address in zip(self.maps, mapped, strict=True):
            maps += by_address[address]
        direct.launch(
            *self.grid, stream, *direct.fixed, *maps, *self.without, *addresses, *self.tail
        )

    def _prepare(self) -> None:
        direct = _c_launcher(self.compiled, len(self.likes))
        if direct is not None:
            self.maps = [
                TensorMaps(like, functools.partial(direct.make, metadata=metadata))
                for like, metadata in zip(self.likes, direct.metadata, strict=True)
            ]
        # in this order: another thread may launch meanwhile
        self.direct = direct
        self.runner = self.compiled[self.grid]


def _c_launcher(compiled: Any, maps: int) -> _Direct | None:
    """The C function below Triton's launcher of `compiled`; None if it is not as in Triton 3.6."""
    import triton

    reason = f"Triton {triton.__version__} is not {KNOWN_TRITON}x"
    if triton.__version__.startswith(KNOWN_TRITON):
        try:
            return _c_launcher_of_36(compiled, maps)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"Triton {triton.__version__} has another launcher ({error})"
    _say_once(reason)
    return None


def _c_launcher_of_36(compiled: Any, maps: int) -> _Direct:
    from triton import knobs
    from triton.backends.nvidia import driver

    run = compiled.run
    if type(run) is not driver.CudaLauncher:
        raise TypeError(f"a {type(run).__name__}")
    if run.global_scratch_size or run.profile_scratch_size:
        raise ValueError("scratch memory")
    launch, metadata = run.launch, []
    if maps:
        inner = inspect.getclosurevars(launch).nonlocals
        launch, metadata = inner["launcher"], inner["tensordesc_meta"]
    if not inspect.isbuiltin(launch) or launch.__name__ != "launch" or len(metadata) != maps:
        raise TypeError("no C function")
    if None in metadata or driver._BASE_ARGS_FORMAT != "iiiKKppOOOOOO":
        raise ValueError("other arguments")
    fixed = (
        compiled.function,
        run.launch_cooperative_grid,
        run.launch_pdl,
        None,  # global scratch
        None,  # profile scratch
        compiled.packed_metadata,
        None,  # launch metadata, for the hooks
        None,
        None,
    )
    hooks = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    return _Direct(launch, fixed, driver.make_tensordesc_arg, metadata, hooks)


@functools.cache
def _say_once(reason: str) -> None:
    _log.info("%s: each kernel launch takes about 15 µs more of the CPU", reason)


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

    Its parameters are tensor maps, pointers, scalars and constants, in this order. The last of the
    maps may be None.
    """
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
        for one in [pool.submit(compiled, *call) for call in calls]:
            one.result()


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
    """Put `value` into `launches`, which never holds more than MOST."""
    if len(launches) >= MOST:
        launches.clear()
    launches[key] = value


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make x's GPU the current one, if it is not already."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def stream_of(device: int) -> int:
    """The current stream of a GPU, as a launcher takes it."""
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
