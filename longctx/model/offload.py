"""Saved activations and frozen weights in pinned host memory, copied on a stream of their own while
the GPU computes.

Host memory is pinned once and used again by every forward pass. On a CPU tensors are copied too, so
that tests there run the code of a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class HostBuffers:
    """Host memory for the saved activations of one block."""

    is_refused = False  # by a host without memory for them: the block stays on the GPU
    # Of each model, by its first block: a model that is deleted gives back its host memory
    _pool: ClassVar[WeakKeyDictionary[nn.Module, dict[Any, HostBuffers]]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.in_use = False

    @classmethod
    def of(cls, first_block: nn.Module, device: torch.device, block: int) -> HostBuffers:
        """Return the buffers of `block`; a second forward before its backward gets others."""
        own = cls._pool.setdefault(first_block, {})
        each = (own.setdefault((device, n), cls()) for n in count(block, 1 << 20))
        buffers = next(x for x in each if not x.in_use)
        buffers.in_use = True
        return buffers

    @classmethod
    def free(cls) -> None:
        """Give back all host memory that no forward pass holds."""
        for first_block, own in cls._pool.items():
            cls._pool[first_block] = {at: buffers for at, buffers in own.items() if buffers.in_use}

    def like(self, name: str, x: Tensor) -> Tensor:
        buffer = self.memory.get(name)
        if buffer is None or buffer.numel() < x.numel() or buffer.dtype != x.dtype:
            # The old memory goes first: host memory for both may not be there
            self.memory.pop(name, None)
            self.memory[name] = pinned(x.numel(), x.dtype, x.is_cuda)
        return self.memory[name][: x.numel()].view(x.shape)


@functools.cache
def copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that all blocks copy on."""
    return torch.cuda.Stream(device)


@functools.cache
def print_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Away:
    """Tensors by name in host memory, and on a device while they are needed there."""

    following: Away | None = None  # those of the next block

    def __init__(self, on_host: dict[Any, Tensor], device: torch.device) -> None:
        self.on_host, self.device = on_host, device
        self.on_device: dict[Any, Tensor] | None = None
        self.copied: torch.cuda.Event | None = None

    def prefetch(self) -> None:
        """Begin to copy them to the device, unless they are there."""
        if self.on_device is None:
            device, sources = self.device, self.on_host.items()
            self.on_device = {name: torch.empty_like(x, device=device) for name, x in sources}
            self.copied = _copy(self.on_host.values(), self.on_device.values(), self.device)

    def tensors(self, brings: bool = True) -> dict[Any, Tensor]:
        """Return the tensors on their device, or unless it `brings` them on the host."""
        if brings:
            self.prefetch()
        if self.copied is not None:  # kernels queued from now on wait for their arrival
            torch.cuda.current_stream(self.device).wait_event(self.copied)
        return self.on_host if self.on_device is None else self.on_device


class SavedTensors(Away):
    """Tensors by name, saved for backward on their device or, given `buffers`, on the host."""

    def __init__(self, tensors: dict[str, Tensor], buffers: HostBuffers | None) -> None:
        super().__init__({}, torch.device("cpu"))
        self.on_device = tensors
        if buffers is not None:
            weakref.finalize(self, setattr, buffers, "in_use", False)
        if buffers is None or buffers.is_refused:
            return
        try:
            self.on_host = {name: buffers.like(name, x) for name, x in tensors.items()}
        except MemoryError as error:
            buffers.memory.clear()
            buffers.is_refused = True
            print_once(f"offload: {error}; what is missing stays on the GPU")
            return
        self.device = next(iter(tensors.values())).device
        self.copied = _copy(tensors.values(), self.on_host.values(), self.device)
        # The allocator must not hand out memory that the copying stream still reads
        for x in tensors.values():
            if x.is_cuda:
                x.record_stream(copying_stream(self.device))
        self.on_device = None


@contextlib.contextmanager
def present(weights: Away, ahead: Away | None) -> Iterator[None]:
    """Have `weights` of a block on the device inside the with; those `ahead` arrive meanwhile."""
    for weight, x in weights.tensors().items():
        weight.data = x
    if ahead is not None:
        ahead.prefetch()
    try:
        yield
    finally:
        for weight, x in weights.on_host.items():
            weight.data = x
        weights.on_device = None  # the block after the next takes their memory


def allocate(model: Any, share: float, device: torch.device) -> None:
    """Give `model`'s weights memory: of the host if frozen matrices of this `share` of blocks."""
    blocks, numbers = model.blocks, range(len(model.blocks))

    def frozen(n: int) -> list[nn.Parameter]:
        is_away = round((n + 1) * share) > round(n * share)  # spread evenly
        own = blocks[n].parameters() if is_away else ()
        return [x for x in own if x.ndim == 2 and not x.requires_grad]

    expected = {id(weight) for n in numbers for weight in frozen(n)}
    if not expected:
        model.to_empty(device=device)
        return
    on_host = set[int]()

    def memory_of(weight: Tensor) -> Tensor:
        if id(weight) in expected:
            try:
                memory = pinned(weight.numel(), weight.dtype, device.type == "cuda")
                on_host.add(memory.data_ptr())
                return memory.view(weight.shape)
            except MemoryError as error:
                expected.clear()
                print_once(f"offload: {error}; what is missing stays on the GPU")
        return torch.empty_like(weight, device=device)

    model._apply(memory_of)
    following = None
    for n in reversed(numbers):
        matrices = {weight: weight.data for weight in frozen(n) if weight.data_ptr() in on_host}
        blocks[n].away = Away(matrices, device)
        blocks[n].away.following, following = following, blocks[n].away


def _copy(
    sources: Iterable[Tensor], targets: Iterable[Tensor], device: torch.device
) -> torch.cuda.Event | None:
    """Copy after all that is queued on `device`; return the event that later work must wait for."""
    pairs = list(zip(sources, targets, strict=True))
    if device.type != "cuda" or not pairs:
        for source, target in pairs:
            target.copy_(source)
        return None
    stream = copying_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def pinned(numel: int, dtype: torch.dtype, for_gpu: bool = True) -> Tensor:
    """Return memory of `numel` elements, page-locked `for_gpu`; MemoryError if there is none."""
    if not for_gpu:
        return torch.empty(numel, dtype=dtype)
    # torch's own allocator would round the size up to a power of two. Pages of 2 MiB are touched
    # and pinned several times faster than those of 4 KiB. A forked process does not get
    # them: it would make the parent write to copies, which the GPU does not see.
    nbytes = numel * dtype.itemsize
    amount = f"{nbytes / 2**30:.1f} GiB of host memory"
    try:
        pages = _Pages(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # a limit of the process or the machine
        raise MemoryError(f"{amount}: {error.strerror}") from error
    pages.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # of a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    # Several threads touch the pages; pinning would touch them with one
    memory.zero_()
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code != 0:
        # CUDA keeps the error for the next kernel of torch, which would raise it: one may now
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        raise MemoryError(f"{amount} could not be pinned (CUDA error {code})")
    pages.unpin = partial(torch.cuda.cudart().cudaHostUnregister, memory.data_ptr())
    return memory[:nbytes].view(dtype)


class _Pages(mmap.mmap):
    """Memory that is unpinned before it is given back; a weak reference would call too late."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()
