"""Writing a checkpoint: safetensors files from any number of ranks, while training may continue.

A thread writes the tensors, or a copy of them in host memory so that training may change them
meanwhile. It talks to no other rank: it leaves a JSON next to its files, and the thread of rank 0
completes the folder when there is one of each rank. The folder gets its name when all of it is on
disk, so a kill at any moment leaves it whole or hidden.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx import files
from longctx.files import one_line
from longctx.runs import checkpoint_index
from longctx.runs.checkpoint_index import AT_ONCE, CHUNK, FORMAT, INDEX

IN_FILES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
SHARD = 1 << 30  # bytes of one file, unless a tensor is larger
PAUSE = 0.05  # seconds between two looks for the files of other ranks
OTHERS = 10.0  # seconds that rank 0 of a run that fails waits for them


class Sharded(NamedTuple):
    """One rank's share of a tensor that is cut by rows."""

    part: Tensor  # its rows
    shape: torch.Size  # of the whole
    rows_of: list[slice]  # of each rank


class CheckpointShard(NamedTuple):
    """A safetensors file: a header, then the tensors one after another."""

    file: str
    header: bytes
    tensors: dict[str, tuple[int, Tensor]]  # each with its first byte after the header
    size: int  # bytes after the header

    def copy_to(self, memory: Tensor, non_blocking: bool = False) -> None:
        """Copy the tensors to `memory` (`size` or more,) uint8, in the order of the file."""
        for start, tensor in self.tensors.values():
            target = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor.detach(), non_blocking=non_blocking)


def shards_of(stem: str, tensors: Mapping[str, Tensor]) -> list[CheckpointShard]:
    """Divide `tensors` into files of about SHARD bytes."""
    groups: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if groups[-1] and sum(x.nbytes for x in (tensor, *groups[-1].values())) > SHARD:
            groups.append({})
        groups[-1][name] = tensor
    return [_shard(f"{stem}-{n:03d}.safetensors", x) for n, x in enumerate(groups) if x]


def _shard(file: str, tensors: Mapping[str, Tensor]) -> CheckpointShard:
    """Lay out a file as the safetensors library does: the widest numbers first, so that all are
    aligned, then by name, and a header padded to 8 bytes.
    """
    # The library (0.8) keeps no checksum. Its error for a full disk has no errno, but a full disk
    # has an exit code of its own here. Only their owner can read its files.
    header: dict[str, Any] = {}
    placed: dict[str, tuple[int, Tensor]] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        placed[name], start, end = (end, tensor), end, end + tensor.nbytes
        dtype, shape = IN_FILES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return CheckpointShard(file, len(text).to_bytes(8, "little") + text, placed, end)


@dataclass(eq=False)
class Saving:
    """A checkpoint on its way to the folder `path`: this rank's share of `tensors` and, on rank 0,
    `metadata` and the JSON. When the folder is whole, rank 0 deletes the hidden checkpoints that
    `replaced` returns; that never fails a save: the problem is in `warning`.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Sharded]
    rank: int = 0
    ranks: int = 1
    replaced: Callable[[], list[Path]] = list
    # This rank's files, on rank 0 the folder; has the OSError of a failure
    written: Future[None] = field(init=False)
    memory: list[Tensor] | None = None  # host memory for a copy of each shard
    copied: torch.cuda.Event | None = None  # when a GPU has made the copy
    bytes = 0  # of all files, when the folder is whole, on rank 0
    seconds = 0.0  # until then
    warning: str | None = None
    until = math.inf  # when rank 0 of a failing run stops waiting for others

    def __post_init__(self) -> None:
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        own = {name: share.part for name, share in self.tensors.items() if len(share.part)}
        self.shards = shards_of(f"shard-{self.rank:05d}", own)
        self.gpu = next((tensor.device for tensor in own.values() if tensor.is_cuda), None)
        self.started = time.monotonic()

    def begin(self, thread: ThreadPoolExecutor, memory: list[Tensor] | None = None) -> None:
        """Let `thread` write a copy of the tensors in `memory`. Without `memory` it writes the
        tensors themselves, which must not change before it is done. OSError if it cannot write.
        """
        try:
            # A copy of today's values; ValueError for NaN and infinity, which JSON does not have
            self.metadata = json.loads(json.dumps(self.metadata, allow_nan=False))
            self.partial.mkdir(exist_ok=True)
        except (OSError, ValueError, TypeError) as error:
            raise self._error(error) from error
        if memory is not None:
            self.memory = memory
            # Moments on the host may be on their way there; for others the loop has waited already
            if self.gpu is not None:
                torch.cuda.synchronize(self.gpu)
            # From a GPU the copies are queued on its stream
            for shard, target in zip(self.shards, memory, strict=True):
                shard.copy_to(target, non_blocking=True)
            if self.gpu is not None:
                self.copied = torch.cuda.Event(blocking=True)
                self.copied.record(torch.cuda.current_stream(self.gpu))
        self.written = thread.submit(self._write)

    def _error(self, error: Exception) -> OSError:
        if not self.path.parent.exists():
            return OSError(f"{self.path.parent}: the folder of the run is gone; nothing is saved")
        return OSError(f"{self.path}: the checkpoint could not be written ({one_line(error)})")

    def _write(self) -> None:
        """Write this rank's files, AT_ONCE at a time, then the JSON that lists them for rank 0,
        which completes the folder and deletes the checkpoints that it replaces.
        """
        try:
            self._wait_for_copy()
            with ThreadPoolExecutor(AT_ONCE, initializer=self._use_gpu) as pool:
                written = list(pool.map(self._write_shard, range(len(self.shards))))
            listed = {shard.file: entry for shard, entry in zip(self.shards, written, strict=True)}
            file_of = {name: shard.file for shard in self.shards for name in shard.tensors}
            own = json.dumps({"files": listed, "places": file_of})
            files.write_text(self._json_of(self.rank), own)
            if self.rank or not self._has_all_ranks():
                return
            self._complete()
        except Exception as error:  # also of memory
            raise self._error(error) from error
        self.seconds = time.monotonic() - self.started
        try:
            for path in self.replaced():
                files.remove(path, strict=True)
        except OSError as error:  # the next save tries again
            self.warning = f"older checkpoints could not be deleted ({one_line(error)})"

    def _has_all_ranks(self) -> bool:
        """Wait for the files of all ranks; return False if a run that fails has waited enough."""
        here = time.monotonic()
        while len(list(self.partial.glob("rank-*.json"))) < self.ranks:
            if time.monotonic() > max(self.until, here + OTHERS):
                return False
            time.sleep(PAUSE)
        return True

    def _use_gpu(self) -> None:
        """Have this thread use the GPU of the tensors; a thread begins with the first GPU."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)

    def _wait_for_copy(self) -> None:
        """Wait until the GPU has copied the tensors."""
        self._use_gpu()
        if self.copied is not None:
            self.copied.synchronize()

    def _write_shard(self, number: int) -> dict[str, int]:
        """Write one file; return its size and checksum."""
        shard = self.shards[number]
        content = self.memory[number] if self.memory else torch.empty(shard.size, dtype=torch.uint8)
        if not self.memory:
            shard.copy_to(content)
        crc32, size = 0, 0
        tensors = content.numpy().data[: shard.size]
        chunks = [tensors[start : start + CHUNK] for start in range(0, shard.size, CHUNK)]
        with open(self.partial / shard.file, "wb") as file:
            for chunk in [memoryview(shard.header), *chunks]:
                crc32 = zlib.crc32(chunk, crc32)
                file.write(chunk)
                file.flush()
                if hasattr(os, "posix_fadvise"):  # the disk begins now instead of with fsync
                    os.posix_fadvise(file.fileno(), size, len(chunk), os.POSIX_FADV_DONTNEED)
                size += len(chunk)
            os.fsync(file.fileno())
        return {"bytes": size, "crc32": crc32}

    def _complete(self) -> None:
        """Write the JSON that lists the files of all ranks, and give the folder its name."""
        jsons = [self._json_of(rank) for rank in range(self.ranks)]
        written = [json.loads(path.read_text(encoding="utf-8")) for path in jsons]
        listed = {file: entry for of_rank in written for file, entry in of_rank["files"].items()}
        tensors = {}
        for name, share in self.tensors.items():
            # [file, first row, rows] of each rank that has some
            slices = [
                [of_rank["places"][name], cut.start, cut.stop - cut.start]
                for of_rank, cut in zip(written, share.rows_of, strict=True)
                if cut.stop > cut.start
            ]
            dtype = str(share.part.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(share.shape), "dtype": dtype, "rows": slices}
        content = {"format": FORMAT, **self.metadata, "files": listed, "tensors": tensors}
        crc32 = zlib.crc32(json.dumps(content).encode())
        index = self.partial / INDEX
        index.write_text(json.dumps({"crc32": crc32, "content": content}), encoding="utf-8")
        files.to_disk(index)
        for path in jsons:
            path.unlink()
        files.to_disk(self.partial)
        # An earlier process of the run may have saved this step; it goes with those replaced
        if self.path.exists():
            checkpoint_index.set_aside(self.path)
        os.rename(self.partial, self.path)
        files.to_disk(self.path.parent)
        self.bytes = sum(entry["bytes"] for entry in listed.values())

    def _json_of(self, rank: int) -> Path:
        return self.partial / f"rank-{rank:05d}.json"
