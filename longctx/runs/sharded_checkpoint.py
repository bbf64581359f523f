"""Sharded checkpoints: a folder with one safetensors file per rank, and a JSON that says which rows
of which tensor lie in which file.

A tensor is cut by rows, so that any number of ranks can read back the rows that it needs, and none
ever holds a whole model. No pickle. The folder appears under its name once it is complete on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 3
INDEX = "checkpoint.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IN_FILES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
CHUNK = 1 << 24  # bytes that a checksum reads at one time


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
        rows = torch.empty(max(0, stop - start), *self.shape[1:], dtype=self.dtype)
        for file, first, count in self.parts:
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                with safe_open(self.folder / file, framework="pt") as tensors:
                    part = tensors.get_slice(self.name)[low - first : high - first]
                rows[low - start : high - start] = part
        return rows


def file_of(rank: int, ranks: int) -> str:
    """The name of the file of one rank."""
    return f"shard-{rank:05d}-of-{ranks:05d}.safetensors"


def save(
    path: Path,
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    index: Mapping[str, Any],
    rank: int,
    ranks: int,
    agree: Callable[[str | None], str | None],
) -> None:
    """Write this rank's `tensors` and, on the first rank, `about` and `index`; all ranks call it.

    `index`: tensor → shape, dtype, and [file, first row, rows] of each part, as in `entry`. `agree`
    waits for all ranks and returns the first problem of any of them. Raises OSError, on every rank,
    where one of them cannot write; the folder then does not appear.
    """
    partial = path.with_name(f".{path.name}.partial")
    name = file_of(rank, ranks)

    def begin() -> None:
        if not path.parent.is_dir():
            raise FileNotFoundError("the folder of the run is gone")
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

    def write() -> None:
        held = {key: x.detach().cpu().contiguous() for key, x in tensors.items()}
        save_file(held, partial / name)
        checked = {"bytes": (partial / name).stat().st_size, "crc32": checksum(partial / name)}
        _write_json(partial / f"{name}.json", checked)
        _to_disk(partial / name)

    def finish() -> None:
        if rank == 0:
            files = {
                file_of(n, ranks): json.loads((partial / f"{file_of(n, ranks)}.json").read_text())
                for n in range(ranks)
            }
            for file in files:
                (partial / f"{file}.json").unlink()
            content = {"format": FORMAT, **about, "files": files, "tensors": dict(index)}
            crc32 = zlib.crc32(json.dumps(content).encode())
            _write_json(partial / INDEX, {"crc32": crc32, "content": content})
            os.rename(partial, path)
            _to_disk(path.parent)

    for step in (begin, write, finish):
        problem = None
        try:
            step()
        except (OSError, SafetensorError) as error:
            problem = str(error)
        problem = agree(problem)
        if problem is not None:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"{path}: the checkpoint could not be written; is the disk full? ({problem})"
            )


def entry(shape: list[int], dtype: torch.dtype, rows: list[slice]) -> dict[str, Any]:
    """The index's entry of a tensor of this whole shape, of which each rank has these rows."""
    parts = [
        [file_of(rank, len(rows)), of_rank.start, of_rank.stop - of_rank.start]
        for rank, of_rank in enumerate(rows)
        if of_rank.stop > of_rank.start
    ]
    return {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "rows": parts}


def read(path: Path) -> dict[str, Any]:
    """The checkpoint at `path`, with `Rows` for tensors; ValueError if it is none."""
    try:
        written = json.loads((path / INDEX).read_text(encoding="utf-8"))
        content: dict[str, Any] = written["content"]
        if zlib.crc32(json.dumps(content).encode()) != written["crc32"]:
            raise ValueError(f"{INDEX} is not what was written")
        tensors = {name: Rows(path, name, x) for name, x in content.pop("tensors").items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a checkpoint, or not a whole one ({error})") from error
    return content | {"tensors": tensors}


def verify(path: Path) -> str | None:
    """The first file of the checkpoint at `path` that is not what was written, None if all are."""
    files = read(path).get("files")
    if not isinstance(files, dict) or not files:
        return INDEX
    for name, written in files.items():
        if not isinstance(written, dict) or not written.keys() >= {"bytes", "crc32"}:
            return INDEX
        file = path / Path(name).name
        if not file.is_file() or file.stat().st_size != written["bytes"]:
            return str(name)
        if checksum(file) != written["crc32"]:
            return str(name)
    return None


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    _to_disk(path)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
