"""Checks of tensors in checkpoints, before anything computes with them.

Torch's fused kernels trust shapes, strides and storage of what they are given: a state of another
shape, or one number expanded to a matrix, is read and written out of bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longctx.runs.checkpoint_folder import DTYPES, Rows

READABLE = frozenset(DTYPES.values())  # in which weights and moments are written
CHUNK = 1 << 26  # numbers of a sharded tensor that are looked at together


def flaw(x: Any, shape: Iterable[int], dtypes: Collection[torch.dtype] = READABLE) -> str | None:
    """Say why x of a checkpoint cannot go where a tensor of `shape` is, in one of `dtypes`; None
    where it can.
    """
    if not isinstance(x, Rows):
        if type(x) not in (Tensor, nn.Parameter):
            return f"a {type(x).__name__} in the checkpoint, a tensor in the model"
        if x.is_nested or x.layout != torch.strided or x.device.type != "cpu":
            return "a tensor of another layout than runs write"
    if x.shape != torch.Size(shape):
        return f"{list(x.shape)} in the checkpoint, {list(shape)} in the model"
    if x.dtype not in dtypes:
        names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"{str(x.dtype).removeprefix('torch.')} in the checkpoint, where {names} is written"
    if isinstance(x, Rows):
        return x.flaw()
    last = x.storage_offset() + x.numel()
    if not x.is_contiguous() or x.is_neg() or x.untyped_storage().nbytes() < last * x.itemsize:
        return "not one block of memory, as runs write it"
    return None


def overlapping(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that shares memory with another one; None where none does."""
    end = 0
    for name, x in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if x.numel() and x.data_ptr() < end:
            return name
        end = max(end, x.data_ptr() + x.nbytes)
    return None


def not_finite(tensors: Mapping[str, Any]) -> str | None:
    """The name of the first tensor, or `Rows`, that holds NaN or infinity; None where none does."""
    # All are queued before the first is waited for
    checks = {name: is_finite(x) for name, x in tensors.items()}
    return next((name for name, finite in checks.items() if not finite), None)


@torch.no_grad()
def is_finite(x: Any) -> Tensor:
    """Whether every number of x is finite, on its device: as the least and the greatest are, which
    takes one pass, where torch.isfinite(x).all() takes 50 times as long on a CPU.
    """
    if isinstance(x, Rows):
        step = max(1, CHUNK // max(1, x.shape[1:].numel()))
        parts = [x[start : start + step] for start in range(0, x.shape[0], step)]
        return torch.stack([is_finite(part) for part in parts]).all()
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.isfinite(torch.stack(torch.aminmax(x))).all()
