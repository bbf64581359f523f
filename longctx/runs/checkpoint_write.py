"""Writing a checkpoint: files of safetensors by any number of ranks, while the run goes on or not.

What is written are the tensors themselves, or a copy of them in host memory (`Snapshot`), so that
they may change meanwhile. The thread that writes talks to no other rank: it leaves a JSON beside
its files, and the first rank completes the folder once there is one of each. Only `begin` and
`end` are called by all ranks together.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx import files
from longctx.runs.checkpoint_folder import IN_FILES, Sharded
from longctx.runs.checkpoint_index import AT_ONCE, FORMAT, INDEX
from longctx.runs.removal import Removal, set_aside

PART = 1 << 30  # bytes of one file, unless a tensor is larger
CHUNK = 1 << 24  # bytes that are written, and given to the disk, at one time
POLL = 0.05  # seconds between looks for what other ranks have written


class Writers(NamedTuple):
    """Which rank writes, of how many; `agree` waits for all of them and returns the first problem
    that any of them has.
    """

    rank: int = 0
    ranks: int = 1
    agree: Callable[[str | None], str | None] = lambda problem: problem


ALONE = Writers()


class Cancelled(Exception):
    """Raised in the threads that write a checkpoint which is given up."""


class OtherRankFailed(Exception):
    """Raised on the first rank where another one could not write; it holds that one's problem."""


class Part(NamedTuple):
    """A file of safetensors: a header, then the tensors one after another."""

    file: str
    header: bytes
    tensors: dict[str, tuple[int, Tensor]]  # each with its first byte after the header
    size: int  # bytes after the header

    def copy_to(self, memory: Tensor, non_blocking: bool = False) -> None:
        """Copy the tensors to `memory` (`size` or more,) uint8, as they lie in the file."""
        for start, x in self.tensors.values():
            place = memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
            place.copy_(x.detach(), non_blocking=non_blocking)


def parts_of(stem: str, tensors: Mapping[str, Tensor]) -> list[Part]:
    """The files of about PART bytes that hold `tensors`."""
    groups: list[dict[str, Tensor]] = []
    size = 0
    for name, x in tensors.items():
        if not groups or size + x.nbytes > PART:
            groups.append({})
            size = 0
        groups[-1][name] = x
        size += x.nbytes
    return [_part(f"{stem}-{n:03d}.safetensors", group) for n, group in enumerate(groups)]


def _part(file: str, tensors: Mapping[str, Tensor]) -> Part:
    """The file of `tensors`, laid out as the library of safetensors does: the widest numbers first,
    so that all are aligned, then by name, and a header padded to 8 bytes.
    """
    header: dict[str, Any] = {}
    placed: dict[str, tuple[int, Tensor]] = {}
    end = 0
    for name, x in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        start, end = end, end + x.nbytes
        offsets = [start, end]
        header[name] = {"dtype": IN_FILES[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
        placed[name] = (start, x)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return Part(file, len(text).to_bytes(8, "little") + text, placed, end)


class Snapshot:
    """Host memory for a copy of what is saved, kept from one checkpoint to the next.

    `allocate` gives so many bytes as (bytes,) uint8.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self.allocate = allocate
        self.memory: list[Tensor] = []
        self.copied: list[torch.cuda.Event] = []  # when each part is there; from a GPU
        self.is_last = False  # no copy follows: memory goes as soon as it is written

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have memory for parts of these sizes; MemoryError or RuntimeError where there is none."""
        if not self.holds(sizes):
            self.memory = []  # what there was goes first
            self.memory = [self.allocate(size) for size in sizes]

    def holds(self, sizes: Sequence[int]) -> bool:
        """Whether there is memory for parts of these sizes."""
        return [len(one) for one in self.memory] == list(sizes)

    def take(self, parts: Sequence[Part]) -> None:
        """Copy the tensors of `parts`; from a GPU that is queued on its stream, like a kernel."""
        self.reserve([part.size for part in parts])
        devices = {x.device for part in parts for _, x in part.tensors.values()}
        gpus = [device for device in devices if device.type == "cuda"]
        if gpus and len(devices) > 1:  # moments that lie on the host may be on their way there
            torch.cuda.synchronize(gpus[0])
        self.copied = []
        for part, place in zip(parts, self.memory, strict=True):
            part.copy_to(place, non_blocking=True)
            if gpus:
                self.copied.append(torch.cuda.Event(blocking=True))
                self.copied[-1].record(torch.cuda.current_stream(gpus[0]))

    def wait(self, number: int) -> None:
        """Wait until the copy of part `number` is there."""
        if self.copied:
            self.copied[number].synchronize()

    def written(self, number: int) -> None:
        """Note that part `number` is on disk."""
        if self.is_last:
            self.memory[number] = torch.empty(0, dtype=torch.uint8)


class Saving:
    """A checkpoint on its way to the folder `path`: what this rank has of `tensors` and, on the
    first rank, `about` and the index.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        tensors: Mapping[str, Sharded],
        writers: Writers = ALONE,
    ) -> None:
        self.path, self.about, self.tensors, self.writers = path, about, tensors, writers
        self.partial = path.with_name(f".{path.name}.partial")
        held = {name: x.part for name, x in tensors.items() if len(x.part)}
        self.parts = parts_of(f"shard-{writers.rank:05d}", held)
        self.snapshot: Snapshot | None = None
        # What the first rank does once it is whole, and what that has begun to delete
        self.then: Callable[[], Removal | None] = lambda: None
        self.removal: Removal | None = None
        self.bytes = 0  # of all files, once it is whole
        self.started = self.seconds = 0.0  # and the seconds that took
        self.problem: str | None = None
        self.error: BaseException | None = None  # behind the problem
        self.is_told = False  # whether the first rank can read the problem
        self._is_cancelled = threading.Event()
        self._has_written = threading.Event()  # this rank's files, or it cannot
        # What the thread does; after a signal, a join returns too early (bpo-45274)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="checkpoint")

    def begin(self, snapshot: Snapshot | None = None) -> None:
        """Begin to write a copy of the tensors; all ranks call it. Without a `snapshot` to copy
        them to they are written themselves, and must not change before `end` has returned.

        Raises OSError, on every rank, where one of them cannot.
        """
        self.started = time.monotonic()
        self._attempt(self._prepare)
        self._agreed(self.problem)
        self.snapshot = snapshot
        if snapshot is not None:
            snapshot.take(self.parts)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this rank has no more to write; the first one is the last to be."""
        return self._has_ended.is_set()

    def check(self) -> None:
        """Raise OSError where it has failed meanwhile and no other rank will say so."""
        if self.problem is not None and self.is_done and not self.is_told:
            self._discard()
            raise OSError(self.problem) from self.error

    def end(self) -> None:
        """Wait until the folder is whole and on disk; all ranks call it.

        Raises OSError, on every rank, where one of them could not write; the folder then does not
        appear.
        """
        self._has_written.wait()
        problem = self.writers.agree(self.problem)
        if problem is not None:
            self._is_cancelled.set()
        self._has_ended.wait()
        self._agreed(problem or self.problem)

    def wait(self) -> None:
        """Wait until this rank has written, whatever comes of it."""
        if self._thread.ident is not None:
            self._has_ended.wait()

    def cancel(self) -> None:
        """Give it up, wherever it is."""
        self._is_cancelled.set()
        self.wait()
        self._discard()

    def _agreed(self, problem: str | None) -> None:
        problem = self.writers.agree(problem)
        if problem is not None:
            self._discard()
            raise OSError(problem) from self.error

    def _discard(self) -> None:
        if self.writers.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _prepare(self) -> None:
        # As it is now; a ValueError where a number is none that JSON has
        self.about = json.loads(json.dumps(self.about, allow_nan=False))
        if self.writers.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir()

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do `work`, and keep what goes wrong: a thread has nobody to raise to."""
        folder = self.path.parent
        try:
            work()
        except Cancelled as error:
            self.problem, self.error = f"{self.path}: given up", error
        except OtherRankFailed as error:
            self.problem = str(error)
        except FileNotFoundError as error:
            where = "the folder of the run" if not folder.exists() else self.partial.name
            self.problem = f"{folder}: {where} is gone, so no checkpoint is written"
            self.error = error
            # The first rank takes it away, where another one could not write, and says why
            self.is_told = self.writers.rank != 0 and folder.exists()
        except OSError as error:
            why = f"could not be written; is the disk full? ({error})"
            self.problem, self.error = f"{self.path}: the checkpoint {why}", error
        except Exception as error:  # such as memory, or a number that JSON has not
            why = " ".join(f"could not be written ({type(error).__name__}: {error})".split())
            self.problem, self.error = f"{self.path}: the checkpoint {why}", error

    def _write(self) -> None:
        """What the thread does."""
        try:
            self._write_and_complete()
        finally:
            self._has_ended.set()

    def _write_and_complete(self) -> None:
        self._attempt(self._write_files)
        self._has_written.set()
        if self.writers.rank == 0:
            if self.problem is None:
                self._attempt(self._complete)
        elif self.problem is not None:
            with suppress(OSError):
                for part in self.parts:  # which makes room for the word
                    (self.partial / part.file).unlink(missing_ok=True)
                write_json(self._word_of(self.writers.rank), {"problem": self.problem})
                self.is_told = True

    def _write_files(self) -> None:
        """Write this rank's files, some at a time, and what they are."""
        free: SimpleQueue[Tensor | None] = SimpleQueue()
        for _ in range(AT_ONCE):
            free.put(None)

        def write(number: int) -> dict[str, int]:
            part = self.parts[number]
            if self.snapshot is not None:
                self.snapshot.wait(number)
                described = self._write_part(part, self.snapshot.memory[number])
                self.snapshot.written(number)
                return described
            memory = free.get()
            if memory is None or len(memory) < part.size:
                memory = torch.empty(part.size, dtype=torch.uint8)
            try:
                part.copy_to(memory)
                return self._write_part(part, memory)
            finally:
                free.put(memory)

        device = _gpu_of(self.parts)
        use_device(device)
        with ThreadPoolExecutor(AT_ONCE, initializer=lambda: use_device(device)) as pool:
            written = list(pool.map(write, range(len(self.parts))))
        described = {part.file: one for part, one in zip(self.parts, written, strict=True)}
        places = {name: part.file for part in self.parts for name in part.tensors}
        word = {"files": described, "places": places}
        write_json(self._word_of(self.writers.rank), word)

    def _write_part(self, part: Part, memory: Tensor) -> dict[str, int]:
        """Write one file from `memory`; return its size and checksum."""
        crc32, size = 0, 0
        with open(self.partial / part.file, "xb", buffering=0) as file:
            for chunk in _chunks(part, memory):
                if self._is_cancelled.is_set():
                    raise Cancelled
                crc32 = zlib.crc32(chunk, crc32)
                left = chunk
                while left:
                    left = left[file.write(left) :]
                if hasattr(os, "posix_fadvise"):  # the disk begins now, and not with fsync
                    os.posix_fadvise(file.fileno(), size, len(chunk), os.POSIX_FADV_DONTNEED)
                size += len(chunk)
            os.fsync(file.fileno())
        return {"bytes": size, "crc32": crc32}

    def _complete(self) -> None:
        """Wait for the files of all ranks, and give the folder its name."""
        written = self._written_by_ranks()
        for rank in range(self.writers.ranks):
            self._word_of(rank).unlink()
        index = _index(self.tensors, written)
        content = {"format": FORMAT, **self.about} | index
        crc32 = zlib.crc32(json.dumps(content).encode())
        write_json(self.partial / INDEX, {"crc32": crc32, "content": content})
        files.to_disk(self.partial)
        # An earlier process of the run may have written one after this step
        replaced = set_aside(self.path) if self.path.exists() else None
        os.rename(self.partial, self.path)
        files.to_disk(self.path.parent)
        if replaced is not None:
            files.remove(replaced)
        self.bytes = sum(file["bytes"] for file in index["files"].values())
        self.seconds = time.monotonic() - self.started
        self.removal = self.then()

    def _written_by_ranks(self) -> list[dict[str, Any]]:
        """What each rank has left word of, once all have."""
        words: dict[int, dict[str, Any]] = {}
        while True:
            there = set(os.listdir(self.partial))
            for rank in range(self.writers.ranks):
                file = self._word_of(rank)
                if rank not in words and file.name in there:
                    words[rank] = json.loads(file.read_text(encoding="utf-8"))
                    if "problem" in words[rank]:
                        raise OtherRankFailed(words[rank]["problem"])
            if len(words) == self.writers.ranks:
                return [words[rank] for rank in range(self.writers.ranks)]
            if self._is_cancelled.wait(POLL):
                raise Cancelled

    def _word_of(self, rank: int) -> Path:
        return self.partial / f"rank-{rank:05d}.json"


def use_device(device: torch.device | None) -> None:
    """Have this thread use `device`, if that is a GPU; a thread begins with the first one."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def _gpu_of(parts: Sequence[Part]) -> torch.device | None:
    tensors = (x for part in parts for _, x in part.tensors.values())
    return next((x.device for x in tensors if x.is_cuda), None)


def _chunks(part: Part, memory: Tensor) -> Iterator[memoryview]:
    """The bytes of a file in order, CHUNK at one time."""
    yield memoryview(part.header)
    content = memory.numpy().data[: part.size]
    for start in range(0, part.size, CHUNK):
        yield content[start : start + CHUNK]


def _index(tensors: Mapping[str, Sharded], written: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What says where everything lies, from what each rank has written: of each file size and
    checksum, of each tensor shape, dtype, and [file, first row, rows] of its parts.
    """
    entries = {}
    for name, x in tensors.items():
        rows = [
            [of_rank["places"][name], mine.start, mine.stop - mine.start]
            for of_rank, mine in zip(written, x.rows_of, strict=True)
            if mine.stop > mine.start
        ]
        dtype = str(x.part.dtype).removeprefix("torch.")
        entries[name] = {"shape": list(x.shape), "dtype": dtype, "rows": rows}
    described = {file: about for of_rank in written for file, about in of_rank["files"].items()}
    return {"files": described, "tensors": entries}


def write_json(path: Path, content: Any) -> None:
    """Write a JSON that is whole, and on disk, when it appears."""
    with files.atomic(path) as partial:
        partial.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        files.to_disk(partial)
