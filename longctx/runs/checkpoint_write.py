"""Writing a checkpoint: safetensors files from any number of ranks, while training may continue.

A thread writes the tensors, or a copy of them in host memory so that training may change them
meanwhile. It talks to no other rank: it leaves a JSON next to its files, and rank 0 completes the
folder when there is one of each rank. A rank that cannot write raises that itself, which ends the
run. Only `begin` is called by all ranks together.
The folder gets its name when all of it is on disk, so a kill at any moment leaves it whole or
hidden.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx import files
from longctx.runs import checkpoint_index
from longctx.runs.checkpoint_index import AT_ONCE, FORMAT, INDEX

IN_FILES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",  # packed weights
}
PART = 1 << 30  # bytes of one file, unless a tensor is larger
CHUNK = 1 << 24  # bytes that are written, and given to the disk, at one time
POLL = 0.05  # seconds between looks for the files of other ranks


class Sharded(NamedTuple):
    """One rank's share of a tensor that is cut by rows."""

    part: Tensor  # its rows
    shape: torch.Size  # of the whole
    rows_of: list[slice]  # of each rank

    @classmethod
    def whole(cls, tensor: Tensor) -> Sharded:
        """Return `tensor` as the share of a rank that has all of it."""
        return cls(tensor, tensor.shape, [slice(0, len(tensor))])


class Writers(NamedTuple):
    """The ranks that write. `barrier` waits for all of them."""

    rank: int = 0
    ranks: int = 1
    barrier: Callable[[], object] = lambda: None


ALONE = Writers()


class Part(NamedTuple):
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


def parts_of(stem: str, tensors: Mapping[str, Tensor]) -> list[Part]:
    """Divide `tensors` into files of about PART bytes."""
    groups: list[dict[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not groups or size + tensor.nbytes > PART:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return [_part(f"{stem}-{n:03d}.safetensors", group) for n, group in enumerate(groups)]


def _part(file: str, tensors: Mapping[str, Tensor]) -> Part:
    """Lay out a file as the safetensors library does: the widest numbers first, so that all are
    aligned, then by name, and a header padded to 8 bytes.

    The library (0.8) keeps no checksum. Its error for a full disk has no errno, but a full disk has
    an exit code of its own here. Only their owner can read its files.
    """
    header: dict[str, Any] = {}
    placed: dict[str, tuple[int, Tensor]] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        start, end = end, end + tensor.nbytes
        offsets = [start, end]
        dtype, shape = IN_FILES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        placed[name] = (start, tensor)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return Part(file, len(text).to_bytes(8, "little") + text, placed, end)


class Saving:
    """A checkpoint on its way to the folder `path`: this rank's share of `tensors` and, on rank 0,
    `metadata` and the JSON.

    When the folder is whole, rank 0 calls `replaced` and deletes the hidden checkpoints that it
    returns. Deleting never fails a save: the first problem is in `warning`.
    """

    written: Future[None]  # this rank's files, on rank 0 the folder; has the OSError if they failed
    deleted: Future[None]  # the checkpoints that this one replaces

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Sharded],
        writers: Writers = ALONE,
        replaced: Callable[[], list[Path]] = list,
    ) -> None:
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        self.metadata, self.tensors = metadata, tensors
        self.writers, self.replaced = writers, replaced
        own_rows = {name: share.part for name, share in tensors.items() if len(share.part)}
        self.parts = parts_of(f"shard-{writers.rank:05d}", own_rows)
        devices = {tensor.device for tensor in own_rows.values()}
        self.gpu = next((device for device in devices if device.type == "cuda"), None)
        self.has_host_tensors = torch.device("cpu") in devices
        self.memory: list[Tensor] | None = None  # host memory for a copy of each part
        self.copied: torch.cuda.Event | None = None  # when a GPU has made the copy
        self.bytes = 0  # of all files, when the folder is whole
        self.seconds = 0.0  # from `begin` until then
        self.hidden: list[Path] = []  # checkpoints to delete
        self.deleted_bytes = 0  # of them
        self.warning: str | None = None
        self._is_cancelled = threading.Event()
        self._started = time.monotonic()

    @property
    def sizes(self) -> list[int]:
        """Return the bytes of host memory that a copy of each part takes."""
        return [part.size for part in self.parts]

    @property
    def problem(self) -> str | None:
        """Wait for the files; return why they could not be written, None if they are on disk."""
        error = self.written.exception()
        return None if error is None else str(error)

    def begin(self, memory: list[Tensor] | None = None) -> None:
        """Begin to write a copy of the tensors in `memory`; all ranks call it. Without `memory` the
        tensors themselves are written and must not change before `end` has returned.

        Raises OSError if this rank cannot write.
        """
        try:
            self._prepare()
        except (OSError, ValueError, TypeError) as error:
            raise OSError(self._problem_of(error)) from error
        self.writers.barrier()  # until rank 0 has made the folder
        if memory is not None:
            self._copy(memory)
        thread = ThreadPoolExecutor(1, "checkpoint")
        self.written = thread.submit(self._write)
        self.deleted = thread.submit(self._delete_replaced)
        thread.shutdown(wait=False)

    def check(self) -> None:
        """Raise OSError if writing has failed: of this rank's files, on rank 0 of the folder."""
        if self.written.done() and self.problem:
            self._discard()
            raise OSError(self.problem)

    def end(self) -> None:
        """Wait until this rank's files are on disk, and on rank 0 until the folder is whole.

        Raises OSError if they could not be written; the folder then does not appear.
        """
        wait([self.written])
        self.check()

    def cancel(self) -> None:
        """Stop writing or deleting and wait for the thread."""
        self._is_cancelled.set()
        self.deleted.exception()
        self._discard()

    def _discard(self) -> None:
        if self.writers.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _problem_of(self, error: Exception) -> str:
        if not self.path.parent.exists():
            gone = "the folder of the run is gone, so no checkpoint is written"
            return f"{self.path.parent}: {gone}"
        return f"{self.path}: the checkpoint could not be written ({files.one_line(error)})"

    def _prepare(self) -> None:
        # A copy of today's values; ValueError for NaN and infinity, which JSON does not have
        self.metadata = json.loads(json.dumps(self.metadata, allow_nan=False))
        if self.writers.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir()

    def _copy(self, memory: list[Tensor]) -> None:
        """Copy the tensors to `memory`; from a GPU the copy is queued on its stream."""
        self.memory = memory
        # Moments on the host may be on their way there
        if self.gpu is not None and self.has_host_tensors:
            torch.cuda.synchronize(self.gpu)
        for part, target in zip(self.parts, memory, strict=True):
            part.copy_to(target, non_blocking=True)
        if self.gpu is not None:
            self.copied = torch.cuda.Event(blocking=True)
            self.copied.record(torch.cuda.current_stream(self.gpu))

    def _write(self) -> None:
        """Write this rank's files; rank 0 completes the folder. Raises OSError."""
        try:
            self._write_files()
            if self.writers.rank == 0:
                self._complete()
        except Exception as error:  # also of memory
            raise OSError(self._problem_of(error)) from error
        if self.writers.rank == 0:
            self._hide_replaced()

    def _write_files(self) -> None:
        """Write this rank's files, AT_ONCE at a time, then the JSON that lists them for rank 0."""
        self._wait_for_copy()
        with ThreadPoolExecutor(AT_ONCE, initializer=self._use_gpu) as pool:
            written = list(pool.map(self._write_part, range(len(self.parts))))
        listed = {part.file: entry for part, entry in zip(self.parts, written, strict=True)}
        file_of = {name: part.file for part in self.parts for name in part.tensors}
        write_json(self._json_of(self.writers.rank), {"files": listed, "places": file_of})

    def _use_gpu(self) -> None:
        """Have this thread use the GPU of the tensors; a thread begins with the first GPU."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)

    def _wait_for_copy(self) -> None:
        """Wait until the GPU has copied the tensors."""
        self._use_gpu()
        if self.copied is not None:
            self.copied.synchronize()

    def _write_part(self, number: int) -> dict[str, int]:
        """Write one file; return its size and checksum."""
        part = self.parts[number]
        if self.memory is None:
            content = torch.empty(part.size, dtype=torch.uint8)
            part.copy_to(content)
        else:
            content = self.memory[number]
        crc32, size = 0, 0
        tensors = content.numpy().data[: part.size]
        chunks = [tensors[start : start + CHUNK] for start in range(0, part.size, CHUNK)]
        with open(self.partial / part.file, "xb") as file:
            for chunk in [memoryview(part.header), *chunks]:
                if self._is_cancelled.is_set():
                    raise OSError("cancelled")
                crc32 = zlib.crc32(chunk, crc32)
                file.write(chunk)
                file.flush()
                if hasattr(os, "posix_fadvise"):  # the disk begins now instead of with fsync
                    os.posix_fadvise(file.fileno(), size, len(chunk), os.POSIX_FADV_DONTNEED)
                size += len(chunk)
            os.fsync(file.fileno())
        return {"bytes": size, "crc32": crc32}

    def _complete(self) -> None:
        """Wait for the files of all ranks, and give the folder its name."""
        written = self._written_by_ranks()
        for rank in range(self.writers.ranks):
            self._json_of(rank).unlink()
        listed = {file: entry for of_rank in written for file, entry in of_rank["files"].items()}
        tensors = {}
        for name, share in self.tensors.items():
            # [file, first row, rows] of each rank that has some
            rows = [
                [of_rank["places"][name], cut.start, cut.stop - cut.start]
                for of_rank, cut in zip(written, share.rows_of, strict=True)
                if cut.stop > cut.start
            ]
            dtype = str(share.part.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(share.shape), "dtype": dtype, "rows": rows}
        content = {"format": FORMAT, **self.metadata, "files": listed, "tensors": tensors}
        crc32 = zlib.crc32(json.dumps(content).encode())
        write_json(self.partial / INDEX, {"crc32": crc32, "content": content})
        files.to_disk(self.partial)
        # An earlier process of the run may have saved this step
        earlier = checkpoint_index.set_aside(self.path) if self.path.exists() else None
        os.rename(self.partial, self.path)
        files.to_disk(self.path.parent)
        if earlier is not None:
            files.remove(earlier)
        self.bytes = sum(entry["bytes"] for entry in listed.values())
        self.seconds = time.monotonic() - self._started

    def _written_by_ranks(self) -> list[dict[str, Any]]:
        """Return the JSON of each rank, when all have written."""
        while True:
            paths = sorted(self.partial.glob("rank-*.json"))
            if len(paths) == self.writers.ranks:
                return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            if self._is_cancelled.wait(POLL):
                raise OSError("cancelled")

    def _json_of(self, rank: int) -> Path:
        return self.partial / f"rank-{rank:05d}.json"

    def _hide_replaced(self) -> None:
        """Hide the checkpoints to delete from readers."""
        try:
            self.hidden = self.replaced()
            sizes = [file.lstat().st_size for path in self.hidden for file in path.rglob("*")]
            self.deleted_bytes = sum(sizes)
        except OSError as error:
            self.warning = f"{self.path.parent}: older checkpoints could not be deleted ({error})"

    def _delete_replaced(self) -> None:
        problem = checkpoint_index.delete(self.hidden, self._is_cancelled)
        self.warning = problem or self.warning


def write_json(path: Path, content: Any) -> None:
    """Write a JSON that is whole, and on disk, when it appears."""
    with files.atomic(path) as partial:
        partial.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        files.to_disk(partial)
