"""Tensors that wait for backward in pinned host memory, copied on a stream of their own while the
GPU computes.

Host memory is pinned once and used again by every forward pass. On a CPU there is nowhere else to
keep a tensor: `Host` copies it all the same, so that what runs on a GPU is tested there.
"""

from __future__ import annotations

import mmap
import weakref
from typing import ClassVar

import torch
from torch import Tensor


class Host:
    """Pinned memory for what one block keeps. One copy at a time: the blocks share a stream per
    device.
    """

    _hosts: ClassVar[dict[tuple[torch.device, int], Host]] = {}
    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.taken = False

    @classmethod
    def of(cls, device: torch.device, block: int) -> Host:
        """The memory of a block; a second forward pass before the first one's backward gets its
        own.
        """
        number = block
        while (host := cls._hosts.setdefault((device, number), cls())).taken:
            number += 1 << 20
        host.taken = True
        return host

    @classmethod
    def stream(cls, device: torch.device) -> torch.cuda.Stream:
        if device not in cls._streams:
            cls._streams[device] = torch.cuda.Stream(device)
        return cls._streams[device]

    def like(self, name: str, x: Tensor) -> Tensor:
        """Memory for a tensor like x."""
        have = self.memory.get(name)
        if have is None or have.numel() < x.numel() or have.dtype != x.dtype:
            self.memory.pop(name, None)
            self.memory[name] = (
                pinned(x.numel(), x.dtype) if x.is_cuda else torch.empty(x.numel(), dtype=x.dtype)
            )
        return self.memory[name][: x.numel()].view(x.shape)


class Kept:
    """Tensors by name, kept where they are or, given a `host`, there."""

    def __init__(self, tensors: dict[str, Tensor], host: Host | None) -> None:
        self.host = host
        self.here: dict[str, Tensor] | None = tensors
        self.arrived: torch.cuda.Event | None = None
        if host is None:
            return
        self.away = {name: host.like(name, x) for name, x in tensors.items()}
        self.device = next(iter(tensors.values())).device
        self._copy(tensors, self.away)
        for x in tensors.values():
            if x.is_cuda:
                x.record_stream(Host.stream(self.device))
        self.here = None
        weakref.finalize(self, _free, host)

    def prefetch(self) -> None:
        """Begin to bring them back."""
        if self.here is None:
            self.here = {
                name: torch.empty_like(x, device=self.device) for name, x in self.away.items()
            }
            self._copy(self.away, self.here)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, on their device; work queued from now on waits for their arrival."""
        self.prefetch()
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        assert self.here is not None
        return self.here

    def _copy(self, sources: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
        if self.device.type != "cuda":
            for name, source in sources.items():
                targets[name].copy_(source)
            return
        stream = Host.stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for name, source in sources.items():
                targets[name].copy_(source, non_blocking=True)
            self.arrived = stream.record_event()


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Page-locked memory of whole pages, where torch's own allocator would round its size up to a
    power of two.
    """
    nbytes = numel * dtype.itemsize
    pages = mmap.mmap(-1, max(1, nbytes))
    made = torch.frombuffer(pages, dtype=torch.uint8)
    made.zero_()  # several threads touch the pages, where pinning would with one
    code = int(torch.cuda.cudart().cudaHostRegister(made.data_ptr(), made.nbytes, 0))
    if code != 0:
        raise MemoryError(
            f"{nbytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {code})"
        )
    weakref.finalize(pages, torch.cuda.cudart().cudaHostUnregister, made.data_ptr())
    return made[:nbytes].view(dtype)


def _free(host: Host) -> None:
    host.taken = False
