"""Context parallelism: the N tokens of a row lie on P ranks, and attention still sees the row.

Ulysses (arXiv 2309.14509): rank r holds n = N/P consecutive tokens of all H heads. An all-to-all
turns that into all N tokens of H/P heads, any backend computes attention on them under the row's
own mask, and a second all-to-all brings the output back:

    q, k, v (B, n, H, D) → exchange → (B, N, H/P, D) → attention → exchange → out (B, n, H, D)

Every interval mask is balanced so, and the arithmetic of a head is that of one device. Where there
are fewer key-value heads than ranks, each is sent to all ranks that need it, and its gradients are
added up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longctx.config.parallel_config import kv_copies

_groups: dict[str, ProcessGroup] = {}  # name → group, for the operator, which takes no objects


@torch.library.custom_op("longctx::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """x (P, ...) → (P, ...), whose entry p is what rank p of `group` has for this rank."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=_groups[group])
    return received


@all_to_all.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _send_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return all_to_all(gradient.contiguous(), ctx.group), None


all_to_all.register_autograd(_send_back, setup_context=_save_group)


class Context:
    """The P = `ranks` ranks of `group` that hold one row, of which this is number `rank`.

    Without a group it is one rank, which holds whole rows.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group, self.rank, self.ranks, self.name = group, 0, 1, ""
        if group is not None:
            self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
            self.name = group.group_name
            _groups[self.name] = group

    def padded(self, length: int) -> int:
        """The tokens of a row of `length` once P divides them."""
        return -(-length // self.ranks) * self.ranks

    def local(self, x: Tensor) -> Tensor:
        """This rank's part (B, n, ...) of x (B, N, ...), n = N/P."""
        n = x.shape[1] // self.ranks
        return x[:, self.rank * n : (self.rank + 1) * n]

    def gathered(self, x: Tensor) -> Tensor:
        """(B, N, ...) of the parts x (B, n, ...) of all ranks; without gradient."""
        if self.ranks == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(parts, x.detach().contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def at(self, x: Tensor, places: Tensor) -> Tensor:
        """x of whole rows at `places` (B, m): (B, m, C) of the parts x (B, n, C) of all ranks."""
        n = x.shape[1]
        mine = (places // n == self.rank)[..., None]
        index = (places % n)[..., None].expand(-1, -1, x.shape[-1])
        chosen = x.gather(1, index)
        if self.ranks > 1:
            chosen = torch.where(mine, chosen, 0.0)
            dist.all_reduce(chosen, group=self.group)
        return chosen

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> tuple[Tensor, ...]:
        """Tensors (B, n, H, D) of this rank's tokens → (B, N, H/P, D) of its heads.

        One exchange for all. Each key-value head goes to every rank that has query heads of it.
        """
        if self.ranks == 1:
            return q, k, v, *like_q
        copies = kv_copies(q.shape[2], k.shape[2], self.ranks)
        k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        slots = [x.unflatten(2, (self.ranks, -1)) for x in (q, k, v, *like_q)]
        sent = torch.cat(slots, dim=3).permute(2, 0, 1, 3, 4).contiguous()
        received: Tensor = all_to_all(sent, self.name)
        heads = [x.shape[3] for x in slots]
        return received.transpose(0, 1).flatten(1, 2).split(heads, dim=2)

    def to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors (B, N, H/P, D) of this rank's heads → (B, n, H, D) of its tokens."""
        if self.ranks == 1:
            return tensors
        heads = [x.shape[2] for x in tensors]
        sent = torch.cat(tensors, dim=2).unflatten(1, (self.ranks, -1)).transpose(0, 1)
        received: Tensor = all_to_all(sent.contiguous(), self.name)
        slots = received.permute(1, 2, 0, 3, 4).split(heads, dim=3)
        return tuple(x.flatten(2, 3) for x in slots)

    def summed(self, gradient: Tensor, kv_heads: int) -> Tensor:
        """dk or dv (B, n, Hkv, D), added up over the copies of each head that `to_heads` sent."""
        copies = gradient.shape[2] // kv_heads
        if copies == 1:
            return gradient
        return gradient.unflatten(2, (kv_heads, copies)).float().sum(3)
