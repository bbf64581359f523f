"""Checkpoints on disk: a folder of safetensors files, and a JSON that says which rows of which
tensor lie in which file, with sizes and checksums.

A tensor is cut by rows over the ranks that write, so that any number of ranks can read back the
rows that it needs, and none ever holds a whole model. Nothing in it is code. The folder appears
under its name once it is complete on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longctx.files import remove
from longctx.runs import checkpoint_index
from longctx.runs.checkpoint_index import AT_ONCE, FORMAT, INDEX, checksum

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IN_FILES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PART = 1 << 30  # bytes of one file: as much is copied from a GPU at one time


class Rows:
    """A tensor that lies in files by rows; x[first:last] reads those alone."""

    def __init__(self, folder: Path, name: str, entry: Mapping[str, Any]) -> None:
        self.folder, self.name = folder, name
        self.shape = torch.Size(entry["shape"])
        self.dtype = DTYPES[entry["dtype"]]
        self.parts = [
            (Path(file).name, int(first), int(count)) for file, first, count in entry["rows"]
        ]

    @property
    def ndim(self) -> int:
        """Dimensions of the whole tensor."""
        return len(self.shape)

    def flaw(self) -> str | None:
        """Say why the files do not hold each row once, as this tensor has them; None if they do."""
        end = 0
        for file, first, count in sorted(self.parts, key=lambda part: part[1]):
            if first != end or count < 1:
                return f"without its row {end}, or with that twice"
            try:
                with safe_open(self.folder / file, framework="pt") as tensors:
                    part = tensors.get_slice(self.name)
            except (OSError, SafetensorError) as error:
                return f"not in {file} ({error})"
            held = part.get_shape(), part.get_dtype()
            if held != ([count, *self.shape[1:]], IN_FILES[self.dtype]):
                return f"{held[1]} {held[0]} in {file}, which is not what {INDEX} says"
            end += count
        return None if end == self.shape[0] else f"without its rows from {end} on"

    def __getitem__(self, at: slice) -> Tensor:
        start, stop, _ = at.indices(self.shape[0])
        for file, first, count in self.parts:
            if first <= start < stop <= first + count:
                return self._read(file, start - first, stop - first)  # mapped, not copied
        rows = torch.empty(max(0, stop - start), *self.shape[1:], dtype=self.dtype)
        for file, first, count in self.parts:
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                rows[low - start : high - start] = self._read(file, low - first, high - first)
        return rows

    def _read(self, file: str, start: int, stop: int) -> Tensor:
        with safe_open(self.folder / file, framework="pt") as tensors:
            part: Tensor = tensors.get_slice(self.name)[start:stop]
        return part


class Sharded(NamedTuple):
    """What one rank has of a tensor that is cut by rows."""

    part: Tensor  # its rows
    shape: torch.Size  # of the whole
    rows_of: list[slice]  # of each rank

    @classmethod
    def whole(cls, x: Tensor) -> Sharded:
        """x where one rank has all of it."""
        return cls(x, x.shape, [slice(0, len(x))])


class Writers(NamedTuple):
    """Which rank writes, of how many; `agree` waits for all of them and returns the first problem
    that any of them has.
    """

    rank: int = 0
    ranks: int = 1
    agree: Callable[[str | None], str | None] = lambda problem: problem


ALONE = Writers()


def save(
    path: Path,
    about: Mapping[str, Any],
    tensors: Mapping[str, Sharded],
    writers: Writers = ALONE,
) -> None:
    """Write the folder `path`: what this rank has of `tensors` and, on the first rank, `about` and
    the index. All ranks call it.

    Raises OSError, on every rank, where one of them cannot write; the folder then does not appear.
    """
    partial = path.with_name(f".{path.name}.partial")
    mine = partial / f"rank-{writers.rank:05d}.json"

    def begin() -> None:
        if writers.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

    def write() -> None:
        held = {name: x.part for name, x in tensors.items() if len(x.part)}
        _write_json(mine, _write_parts(partial, f"shard-{writers.rank:05d}", held))

    def finish() -> None:
        if writers.rank == 0:
            ranks = [partial / f"rank-{rank:05d}.json" for rank in range(writers.ranks)]
            written = [json.loads(file.read_text()) for file in ranks]
            content = {"format": FORMAT, **about} | _index(tensors, written)
            crc32 = zlib.crc32(json.dumps(content).encode())
            _write_json(partial / INDEX, {"crc32": crc32, "content": content})
            for file in ranks:
                file.unlink()
            _to_disk(partial)
            remove(path)  # the one after this step that an earlier process of the run wrote
            os.rename(partial, path)
            _to_disk(path.parent)

    for step in (begin, write, finish):
        problem = None
        try:
            step()
        except FileNotFoundError:
            problem = f"{path.parent}: the folder of the run is gone, so no checkpoint is written"
        except (OSError, SafetensorError) as error:
            problem = f"{path}: the checkpoint could not be written; is the disk full? ({error})"
        except ValueError as error:  # a number that JSON has not
            problem = f"{path}: the checkpoint could not be written ({error})"
        problem = writers.agree(problem)
        if problem is not None:
            if writers.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise OSError(problem)


def _write_parts(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write `tensors` into safetensors files of about PART bytes, some at a time; return the size
    and checksum of each file, and which file has which tensor.
    """
    files: dict[str, Any] = {}
    places: dict[str, str] = {}
    writing: deque[tuple[str, Future[dict[str, int]]]] = deque()

    def wait_for_oldest() -> None:
        name, written = writing.popleft()
        files[name] = written.result()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number, names in enumerate(_in_parts(tensors)):
            file = f"{stem}-{number:03d}.safetensors"
            if len(writing) == AT_ONCE:  # so many parts at most are in memory
                wait_for_oldest()
            part = {name: tensors[name].detach().cpu().contiguous() for name in names}
            writing.append((file, pool.submit(_write_part, folder / file, part)))
            places |= dict.fromkeys(names, file)
        while writing:
            wait_for_oldest()
    return {"files": files, "places": places}


def _in_parts(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names in groups of about PART bytes, at least one."""
    names: list[str] = []
    size = 0
    for name, x in tensors.items():
        if names and size + x.nbytes > PART:
            yield names
            names, size = [], 0
        names.append(name)
        size += x.nbytes
    if names:
        yield names


def _write_part(file: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    save_file(tensors, file)
    _to_disk(file)
    return {"bytes": file.stat().st_size, "crc32": checksum(file)}


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
    files = {file: about for of_rank in written for file, about in of_rank["files"].items()}
    return {"files": files, "tensors": entries}


def read(path: Path) -> dict[str, Any]:
    """The checkpoint in the folder `path`, with `Rows` for tensors; ValueError, which says why, if
    it is not whole.
    """
    content = checkpoint_index.read(path)
    try:
        tensors = {name: Rows(path, name, x) for name, x in content.pop("tensors").items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{INDEX} is not what runs write ({error})") from error
    return content | {"tensors": tensors}


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    _to_disk(path)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
