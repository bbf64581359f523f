"""Checkpoints on disk: a folder of safetensors files, and a JSON that says which rows of which
tensor lie in which file, with sizes and checksums.

A tensor is cut by rows over the ranks that write, so that any number of ranks can read back the
rows that it needs, and none ever holds a whole model. Nothing in it is code. The folder appears
under its name once it is complete on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longctx.runs import checkpoint_index
from longctx.runs.checkpoint_index import INDEX

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IN_FILES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Rows:
    """A tensor that lies in files by rows; x[first:last] reads those alone."""

    def __init__(self, folder: Path, name: str, entry: Mapping[str, Any]) -> None:
        self.folder, self.name = folder, name
        self.shape = torch.Size(entry["shape"])
        self.dtype = DTYPES[entry["dtype"]]
        self.parts = [(str(file), int(first), int(count)) for file, first, count in entry["rows"]]

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


def read(path: Path) -> dict[str, Any]:
    """Return the checkpoint in the folder `path`, with `Rows` for tensors; ValueError, which says
    why, if it is not whole. Rows are in listed files alone, which `checkpoint_index.verify` checks.
    """
    content = checkpoint_index.read(path)
    try:
        tensors = {name: Rows(path, name, x) for name, x in content.pop("tensors").items()}
        for x in tensors.values():
            if unlisted := {file for file, _, _ in x.parts} - content["files"].keys():
                raise ValueError(f"{x.name} is in {unlisted.pop()}, which is not listed")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{INDEX} is not what runs write ({error})") from error
    return content | {"tensors": tensors}
