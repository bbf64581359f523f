"""Checks of tensors in checkpoints, before anything computes with them.

Torch's fused kernels trust shapes of what they are given: a state of another shape is read and
written out of bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from longctx.runs.checkpoint_folder import DTYPES, Rows

READABLE = frozenset(DTYPES.values())  # in which weights and moments are written
CHUNK = 1 << 26  # numbers of a sharded tensor that are looked at together


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
        return f"{str(x.dtype).removeprefix('torch.')} in the checkpoint, where {names} is written"
    return x.flaw() if isinstance(x, Rows) else None


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
