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

from longctx.attention.mask import Mask
from longctx.attention.registry import Attention, Gradients
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

    def over_ranks(self, attend: Attention) -> Attention | Ulysses:
        """`attend` where each rank has its part of the rows."""
        return attend if self.ranks == 1 else Ulysses(attend, self)

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

    def to_heads(self, x: Tensor) -> Tensor:
        """(B, n, H, D) of this rank's tokens → (B, N, H/P, D) of this rank's heads."""
        parts = x.unflatten(2, (self.ranks, -1)).permute(2, 0, 1, 3, 4)
        received: Tensor = all_to_all(parts.contiguous(), self.name)
        return received.transpose(0, 1).flatten(1, 2)

    def to_tokens(self, x: Tensor) -> Tensor:
        """(B, N, H/P, D) of this rank's heads → (B, n, H, D) of this rank's tokens."""
        parts = x.unflatten(1, (self.ranks, -1)).transpose(0, 1)
        received: Tensor = all_to_all(parts.contiguous(), self.name)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


class Ulysses:
    """An attention backend on rows that lie on several ranks; called as `Attention` is.

    q, k, v and out are of this rank's tokens; the mask, and lse (B, H/P, N), are of whole rows.
    """

    def __init__(self, attend: Attention, context: Context) -> None:
        self.attend, self.context = attend, context

    @property
    def saves_output(self) -> bool:
        """Whether `backward` takes the forward's out and lse, and need not run it again."""
        return self.attend.saves_output

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, return_lse: bool = False
    ) -> Any:
        """out (B, n, H, D), with `return_lse` also lse."""
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        copies = kv_copies(q.shape[2], k.shape[2], self.context.ranks)
        k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        q, k, v = self._to_heads(q, k, v)
        if not return_lse:
            return self.context.to_tokens(self.attend(q, k, v, mask))
        out, lse = self.attend(q, k, v, mask, return_lse=True)
        return self.context.to_tokens(out), lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask: Mask,
    ) -> Gradients:
        """dq, dk, dv of this rank's tokens; see `Attention.backward`."""
        copies = kv_copies(q.shape[2], k.shape[2], self.context.ranks)
        dtypes, (q, k, v) = (q.dtype, k.dtype), (x.to(out.dtype) for x in (q, k, v))
        k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        do, q, k, v, out = self._to_heads(do.to(out.dtype), q, k, v, out)
        dq, dk, dv = self.attend.backward(do, q, k, v, out, lse, mask)
        dq, dk, dv = self._to_tokens(dq, dk, dv)
        if copies > 1:
            dk, dv = (x.unflatten(2, (-1, copies)).float().sum(3) for x in (dk, dv))
        return dq.to(dtypes[0]), dk.to(dtypes[1]), dv.to(dtypes[1])

    def _to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`Context.to_heads` of each of `tensors`, in one exchange."""
        ranks = self.context.ranks
        slots = [x.unflatten(2, (ranks, -1)) for x in tensors]
        received = self.context.to_heads(torch.cat(slots, dim=3).flatten(2, 3))
        return received.split([x.shape[3] for x in slots], dim=2)

    def _to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`Context.to_tokens` of each of `tensors`, in one exchange."""
        ranks, heads = self.context.ranks, [x.shape[2] for x in tensors]
        received = self.context.to_tokens(torch.cat(tensors, dim=2)).unflatten(2, (ranks, -1))
        return tuple(x.flatten(2, 3) for x in received.split(heads, dim=3))
