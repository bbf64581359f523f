"""Writing a checkpoint: safetensors files from any number of ranks, while training may continue.

A thread writes the tensors, or a copy of them in host memory so that training may change them
meanwhile. It talks to no other rank: it leaves a JSON next to its files, and rank 0 completes the
folder when there is one of each rank. The folder gets its name when all of it is on disk, so a kill
at any moment leaves it whole or hidden.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from longctx import files
from longctx.runs import checkpoint_index
from longctx.runs.checkpoint_index import AT_ONCE, FORMAT, INDEX

PART = 1 << 30  # bytes of one file, unless a tensor is larger
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
    """The ranks that write, and how they wait for one another before the first file."""

    rank: int = 0
    ranks: int = 1
    barrier: Callable[[], None] = lambda: None


ALONE = Writers()


class Part(NamedTuple):
    """The tensors of one safetensors file."""

    file: str
    tensors: dict[str, Tensor]

    @property
    def size(self) -> int:
        """Return the bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def in_memory(self, memory: Tensor) -> dict[str, Tensor]:
        """Return empty tensors like those of the file in `memory` (`size`,) uint8."""
        views, end = {}, 0
        # The widest numbers first, so that all are aligned
        for name, tensor in sorted(self.tensors.items(), key=lambda item: -item[1].itemsize):
            start, end = end, end + tensor.nbytes
            views[name] = memory[start:end].view(tensor.dtype).view(tensor.shape)
        return views


def parts_of(rank: int, tensors: Mapping[str, Tensor]) -> list[Part]:
    """Divide the `tensors` of a rank into files of about PART bytes."""
    parts: list[Part] = []
    for name, tensor in tensors.items():
        if not parts or parts[-1].size + tensor.nbytes > PART:
            parts.append(Part(f"shard-{rank:05d}-{len(parts):03d}.safetensors", {}))
        parts[-1].tensors[name] = tensor.detach()
    return parts


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
        self.parts = parts_of(writers.rank, own_rows)
        devices = {tensor.device for tensor in own_rows.values()}
        self.gpu = next((device for device in devices if device.type == "cuda"), None)
        self.has_host_tensors = torch.device("cpu") in devices
        self.copied: torch.cuda.Event | None = None  # when a GPU has made the copy
        self.bytes = 0  # of all files, when the folder is whole
        self.seconds = 0.0  # from `begin` until then
        self.hidden: list[Path] = []  # checkpoints to delete
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

        Raises OSError if rank 0 cannot make the folder.
        """
        self.metadata = json.loads(json.dumps(self.metadata))  # a copy of today's values
        if self.writers.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            try:
                self.partial.mkdir()
            except OSError as error:
                raise OSError(self._problem_of(error)) from error
        self.writers.barrier()
        if memory is not None:
            self._copy(memory)
        thread = ThreadPoolExecutor(1, "checkpoint")
        self.written = thread.submit(self._write)
        self.deleted = thread.submit(self._delete_replaced)
        thread.shutdown(wait=False)

    def end(self) -> None:
        """Wait until this rank's files are on disk, on rank 0 the whole folder; OSError if they
        could not be written. The folder then does not appear.
        """
        if problem := self.problem:
            raise OSError(problem)

    def cancel(self) -> None:
        """Stop writing or deleting and wait for the thread."""
        self._is_cancelled.set()
        self.deleted.exception()

    def _problem_of(self, error: Exception) -> str:
        if not self.path.parent.exists():
            gone = "the folder of the run is gone, so no checkpoint is written"
            return f"{self.path.parent}: {gone}"
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"{self.path}: the checkpoint could not be written ({reason})"

    def _copy(self, memory: list[Tensor]) -> None:
        """Copy the tensors to `memory`; from a GPU the copy is queued on its stream."""
        # Moments on the host may be on their way there
        if self.gpu is not None and self.has_host_tensors:
            torch.cuda.synchronize(self.gpu)
        copies = [part.in_memory(target) for part, target in zip(self.parts, memory, strict=True)]
        for part, views in zip(self.parts, copies, strict=True):
            for name, view in views.items():
                view.copy_(part.tensors[name], non_blocking=True)
        self.parts = [part._replace(tensors=x) for part, x in zip(self.parts, copies, strict=True)]
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
            problem = self._problem_of(error)
            self._discard(problem)
            raise OSError(problem) from error
        if self.writers.rank == 0:
            self._hide_replaced()

    def _write_files(self) -> None:
        """Write this rank's files, AT_ONCE at a time, then the JSON that lists them for rank 0."""
        use_device(self.gpu)
        self._wait_for_copy()
        with ThreadPoolExecutor(AT_ONCE, initializer=lambda: use_device(self.gpu)) as pool:
            listed = dict(pool.map(self._write_part, self.parts))
        file_of = {name: part.file for part in self.parts for name in part.tensors}
        write_json(self._json_of(self.writers.rank), {"files": listed, "places": file_of})

    def _wait_for_copy(self) -> None:
        """Wait until the GPU has copied the tensors."""
        if self.copied is not None:
            self.copied.synchronize()

    def _write_part(self, part: Part) -> tuple[str, dict[str, int]]:
        """Write one file; return its name, size and checksum."""
        if self._is_cancelled.is_set():
            raise OSError("cancelled")
        path = self.partial / part.file
        save_file({name: x.cpu().contiguous() for name, x in part.tensors.items()}, path)
        files.as_umask_allows(path)
        files.to_disk(path)
        with open(path, "rb") as file:
            crc32 = checkpoint_index.checksum(file)
        return part.file, {"bytes": path.stat().st_size, "crc32": crc32}

    def _discard(self, problem: str) -> None:
        """Remove what is written, as rank 0; leave the `problem` to rank 0, as another rank."""
        if self.writers.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        with suppress(OSError):
            # Make room for the JSON: the disk may be full
            for part in self.parts:
                (self.partial / part.file).unlink(missing_ok=True)
            write_json(self._json_of(self.writers.rank), {"problem": problem})

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
        self.partial.rename(self.path)
        files.to_disk(self.path.parent)
        if earlier is not None:
            files.remove(earlier)
        self.bytes = sum(entry["bytes"] for entry in listed.values())
        self.seconds = time.monotonic() - self._started

    def _written_by_ranks(self) -> list[dict[str, Any]]:
        """Return the JSON of each rank when all have written; OSError if one could not."""
        while True:
            paths = sorted(self.partial.glob("rank-*.json"))
            found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            for path, content in zip(paths, found, strict=True):
                if "problem" in content:
                    raise OSError(f"{path.stem}: {content['problem']}")
            if len(found) == self.writers.ranks:
                return found
            if self._is_cancelled.wait(POLL):
                raise OSError("cancelled")

    def _json_of(self, rank: int) -> Path:
        return self.partial / f"rank-{rank:05d}.json"

    def _hide_replaced(self) -> None:
        """Hide the checkpoints to delete from readers."""
        try:
            self.hidden = self.replaced()
        except OSError as error:
            self.warning = f"{self.path.parent}: older checkpoints could not be deleted ({error})"

    def _delete_replaced(self) -> None:
        problem = checkpoint_index.delete(self.hidden, self._is_cancelled)
        self.warning = problem or self.warning


def use_device(device: torch.device | None) -> None:
    """Have this thread use `device`, if that is a GPU; a thread begins with the first GPU."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON that is whole, and on disk, when it appears; ValueError for NaN or infinity."""
    with files.atomic(path) as partial:
        partial.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        files.to_disk(partial)
