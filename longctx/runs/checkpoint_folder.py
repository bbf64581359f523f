"""Tensors of a checkpoint: their rows are in safetensors files, as the JSON of the folder says.

A tensor is cut by rows over the ranks that write, so that any number of ranks can read back the
rows that it needs, and none ever holds a whole model. Shapes and dtypes are checked before anything
computes: torch's fused kernels read and write out of bounds if a state has another shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from longctx.runs import checkpoint_index
from longctx.runs.checkpoint_index import INDEX

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IN_FILES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
READABLE = frozenset(DTYPES.values())  # in which weights and moments are written
FINITE_CHUNK = 1 << 26  # numbers of a tensor on disk that are checked together


class Sharded(NamedTuple):
    """What one rank has of a tensor that is cut by rows."""

    part: Tensor  # its rows
    shape: torch.Size  # of the whole
    rows_of: list[slice]  # of each rank

    @classmethod
    def whole(cls, x: Tensor) -> Sharded:
        """Return x as the share of a rank that has all of it."""
        return cls(x, x.shape, [slice(0, len(x))])


class Rows:
    """A tensor in files, cut by rows; x[first:last] reads only those."""

    def __init__(self, folder: Path, name: str, entry: Mapping[str, Any]) -> None:
        self.folder, self.name = folder, name
        self.shape = torch.Size(entry["shape"])
        self.dtype = DTYPES[entry["dtype"]]
        self.parts: list[tuple[str, int, int]] = [tuple(part) for part in entry["rows"]]

    @property
    def ndim(self) -> int:
        """Return the number of dimensions of the whole tensor."""
        return len(self.shape)

    def __getitem__(self, at: slice) -> Tensor:
        start, stop, _ = at.indices(self.shape[0])
        for file, first, count in self.parts:
            if first <= start < stop <= first + count:
                return self._read(file, start - first, stop - first)  # mapped, not copied
        rows = torch.empty(max(0, stop - start), *self.shape[1:], dtype=self.dtype)
        found = 0
        for file, first, count in self.parts:
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                rows[low - start : high - start] = self._read(file, low - first, high - first)
                found += high - low
        if found != len(rows):
            raise ValueError(
                f"{self.folder}: {INDEX} does not say where all rows of {self.name} are"
            )
        return rows

    def _read(self, file: str, start: int, stop: int) -> Tensor:
        """Return rows of one file; ValueError if they differ from the JSON in shape or dtype."""
        with safe_open(self.folder / file, framework="pt") as tensors:
            part: Tensor = tensors.get_slice(self.name)[start:stop]
        if part.dtype != self.dtype or part.shape != (stop - start, *self.shape[1:]):
            raise ValueError(f"{self.folder / file}: {self.name} differs from {INDEX}")
        return part


def read(path: Path) -> dict[str, Any]:
    """Return the checkpoint in the folder `path`, with `Rows` for tensors; ValueError if its JSON
    is damaged.
    """
    content = checkpoint_index.read(path)
    tensors = {name: Rows(path, name, entry) for name, entry in content["tensors"].items()}
    # `checkpoint_index.verify` looks at listed files only, so no other may hold rows
    used = {file for rows in tensors.values() for file, _, _ in rows.parts}
    if unlisted := used - content["files"].keys():
        raise ValueError(f"{unlisted.pop()} holds rows and is not listed")
    return content | {"tensors": tensors}


def flaw(
    x: Rows | Tensor, shape: Iterable[int], dtypes: Collection[torch.dtype] = READABLE
) -> str | None:
    """Return why x of a checkpoint cannot be read into a tensor of `shape`, in one of `dtypes`;
    None if it can.
    """
    if x.shape != torch.Size(shape):
        return f"{list(x.shape)} in the checkpoint, {list(shape)} in the model"
    if x.dtype not in dtypes:
        names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"{str(x.dtype).removeprefix('torch.')} in the checkpoint instead of {names}"
    return None


def not_finite(tensors: Mapping[str, Any]) -> str | None:
    """Return the name of the first tensor, or `Rows`, with NaN or infinity in it, None if all are
    finite.
    """
    # All are queued before the first is waited for
    checks = {name: is_finite(x) for name, x in tensors.items()}
    return next((name for name, finite in checks.items() if not finite), None)


@torch.no_grad()
def is_finite(x: Any) -> Tensor:
    """Return, on its device, whether every number of x is finite.

    The least and the greatest number tell, in one pass: torch.isfinite(x).all() takes 50 times as
    long on a CPU.
    """
    if isinstance(x, Rows):
        step = max(1, FINITE_CHUNK // max(1, x.shape[1:].numel()))
        parts = [x[start : start + step] for start in range(0, x.shape[0], step)]
        return torch.stack([is_finite(part) for part in parts]).all()
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.isfinite(torch.stack(torch.aminmax(x))).all()
