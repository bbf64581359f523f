"""Weights sharded over the ranks of a run by torch's FSDP2 (fully_shard).

Each rank holds some rows of every weight, of its gradient and of its optimizer state. A block's
weights are gathered for its forward and again for its backward, in the precision of the run;
gradients are added up in fp32. Compare ZeRO-3 (arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from longctx.attention.communication import measured
from longctx.config.fields import refuse
from longctx.model import GPT
from longctx.model.packed import is_packed, packed
from longctx.runs.checkpoint_write import Sharded

SHARES = "strategy=fsdp: layers of this model share weights, of which ranks hold slices; use ddp"


def shard(model: GPT, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shard every weight of `model` by rows over the ranks of `mesh` (one dimension), in place;
    blocks compute with `rounded` weights gathered in `dtype`, None: in their own.
    """
    # Sums over many ranks lose bits in bf16; autocast has cast the inputs
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    names = dict(model.named_parameters(remove_duplicate=False))
    refuse((len(set(map(id, names.values()))) < len(names), SHARES))
    rounded = model.rounded if dtype == torch.bfloat16 else names
    if exact := {weight for name, weight in names.items() if name not in rounded}:
        # One small group of all layers, gathered until backward ends: recomputed layers read it
        # without a call of its modules
        owners = (x for x in model.modules() if exact & {*x.parameters(recurse=False)})
        model.owners, others = nn.Sequential(*owners), {*names.values()} - exact
        fully_shard(model.owners, mesh=mesh, reshard_after_forward=False, ignored_params=others)
        model.register_forward_pre_hook(lambda model, _: model.owners.unshard())
    exact = {weight for weight in model.parameters() if isinstance(weight, DTensor)}
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "ignored_params": exact}
    for block in model.blocks:
        fully_shard(block, **shared)
        # Recomputation calls a block by this method too; a layer of transformers has none
        if hasattr(block, "calling"):
            register_fsdp_forward_method(block, "calling")
    fully_shard(model, **shared)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of `tensor`, or `tensor` itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows(tensor: Tensor) -> slice:
    """Return the numbers of this rank's rows, as fully_shard divides them; all if it is whole."""
    mine = tensor.device_mesh.get_local_rank() if isinstance(tensor, DTensor) else 0
    return rows_of_ranks(tensor)[mine]


def rows_of_ranks(tensor: Tensor) -> list[slice]:
    """Return the `rows` of every rank of the mesh, in order."""
    count, ranks = tensor.shape[0], tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1
    # As torch.chunk divides them: the last ranks may have fewer rows, or none
    size = -(-count // ranks)
    return [slice(min(n * size, count), min((n + 1) * size, count)) for n in range(ranks)]


def full(tensor: Tensor) -> Tensor:
    """Return all rows of `tensor`, gathered from the ranks; all ranks call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with measured():
        return tensor.full_tensor()


def like(tensor: DTensor, part: Tensor) -> DTensor:
    """Return a tensor sharded as `tensor` is; `part` has this rank's rows."""
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def write(tensor: Tensor, source: Any, first: int = 0) -> None:
    """Copy `source`, packed if `tensor` is, to its rows from `first` on; a rank writes its own.

    Of a `SlicedTensor` or `MergedRows` it reads only these.
    """
    mine = rows(tensor)
    start, stop = max(mine.start, first), min(mine.stop, first + source.shape[0])
    if start < stop:
        values = source[start - first : stop - first]
        if is_packed(tensor) and not is_packed(values):
            values = packed(values.to(torch.get_default_device()))
        local(tensor)[start - mine.start : stop - mine.start].copy_(values)


def draw(tensor: Tensor, fill: Callable[[Tensor], Any]) -> None:
    """Fill `tensor` at random, with the same values however it is sharded, and on the host."""
    device = torch.get_default_device()
    if not isinstance(tensor, DTensor) and tensor.device == device:
        fill(tensor)
        return
    # The whole tensor exists for a moment, to draw the same random numbers as on one device
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    fill(values)
    write(tensor, values)


def reshard(module: nn.Module) -> None:
    """Free gathered weights: validation leaves some, and the optimizer knows only the slices."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def is_sharded(model: nn.Module) -> TypeGuard[FSDPModule]:
    """Return True if the ranks hold slices of `model`."""
    return isinstance(model, FSDPModule)


@contextmanager
def unsharded(model: GPT) -> Iterator[None]:
    """Gather the weights outside the blocks of `model`; a block gathers its own when called."""
    if is_sharded(whole := model):
        # Else a block that is called first keeps its weights
        whole._get_fsdp_state()._lazy_init()
        for group in filter(is_sharded, (model, *model.children())):  # its own, those in fp32
            group.unshard()
    try:
        yield
    finally:
        reshard(model)


def parts(module: nn.Module) -> dict[str, Sharded]:
    """Return this rank's part of each weight of `module`, for a checkpoint."""
    reshard(module)
    return {
        name: Sharded(local(weight), weight.shape, rows_of_ranks(weight))
        for name, weight in module.named_parameters()
    }


def trained_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the trained weights, in the order of `optimizer`'s state_dict."""
    names = {id(weight): name for name, weight in module.named_parameters()}
    return [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]


def state_of_rank(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state_dict of `optimizer` with this rank's rows of each tensor of `saved`."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = dict(saved["state"])
    for number, values in state.items():
        weight = weights[number]
        parts = {key: x[rows(weight)] for key, x in values.items() if x.ndim}
        # An optimizer that names its states keeps them as plain tensors, torch's as their weights
        if isinstance(weight, DTensor) and not hasattr(optimizer, "state_names"):
            parts = {key: like(weight, part) for key, part in parts.items()}
        state[number] = values | parts
    return {**saved, "state": state}
