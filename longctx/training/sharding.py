"""Weights sharded over the ranks of a run by torch's FSDP2 (fully_shard).

Each rank holds a slice of the rows of every weight, of its gradient and of its optimizer state. A
block's weights are gathered for its forward and again for its backward, in the precision of the
run; gradients are added up in fp32. Compare ZeRO-3 (arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from longctx.model import GPT


def shard(model: GPT, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard every weight of `model` by rows over the ranks of `mesh` (one dimension), in place.

    Blocks compute with weights gathered in `dtype`.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
        register_fsdp_forward_method(block, "calling")
    fully_shard(model, mesh=mesh, mp_policy=precision)


def local(x: Tensor) -> Tensor:
    """The rows of x that this rank holds; x itself where it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def rows(x: Tensor) -> slice:
    """Which rows of the whole x this rank holds, as fully_shard divides them."""
    if not isinstance(x, DTensor):
        return slice(0, x.shape[0])
    mesh = x.device_mesh
    size = -(-x.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * size, x.shape[0])
    return slice(first, min(first + size, x.shape[0]))


def full(x: Tensor) -> Tensor:
    """All rows of x, gathered from the ranks; all of them call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(x: DTensor, part: Tensor) -> DTensor:
    """A tensor sharded as x is, of which `part` has the rows that this rank holds."""
    result: DTensor = DTensor.from_local(
        part, x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
    )
    return result


@torch.no_grad()
def write(x: Tensor, values: Tensor, first: int = 0) -> None:
    """Copy `values` to the rows of x from `first` on, as far as this rank holds them."""
    mine = rows(x)
    start, stop = max(mine.start, first), min(mine.stop, first + len(values))
    if start < stop:
        local(x)[start - mine.start : stop - mine.start].copy_(values[start - first : stop - first])


def draw(x: Tensor, fill: Callable[[Tensor], Any]) -> None:
    """Fill x at random, with the same values however it is sharded: as a whole, if only here."""
    if isinstance(x, DTensor):
        values = torch.empty(x.shape, dtype=x.dtype, device=x.to_local().device)
        fill(values)
        write(x, values)
    else:
        fill(x)
