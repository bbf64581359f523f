"""Exchanges: attention sees a whole sequence of N tokens, and each rank holds n = N/P of them.

`Ulysses` (arXiv 2309.14509): every rank gets all N tokens of H/P heads, so that any backend
attends under the row's own mask with the arithmetic of one device:

    q, k, v (B, n, H, D) → all-to-all → (B, N, H/P, D) → attention → all-to-all → out (B, n, H, D)

`AllGather`: every rank gets the keys and values of all N tokens, a group of heads at a time, and
attends with its own n queries. P need not divide the heads. Compare Llama 3 (arXiv 2407.21783).

`HaloExchange`, for layers with a window: a rank needs its own keys and the last window - 1 of the
rank before.

An exchange belongs to the mask of a layer. Gradients of keys and values are added up in fp32, in
the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longctx.attention.communication import measured
from longctx.config.layout_config import allgather_group, kv_copies, ulysses_parts

# torch 2.13 gave it another name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Triple = tuple[Tensor, Tensor, Tensor]
_groups: dict[str, ProcessGroup] = {}  # name → group, for the operators, which take no objects


@dataclass(frozen=True)
class Ranks:
    """The `count` ranks of `group` that share sequences; this process is number `rank`."""

    rank: int = 0
    count: int = 1
    group: str = ""

    @staticmethod
    def of(group: ProcessGroup) -> Ranks:
        """Return the ranks of `group`, and this process's number among them."""
        _groups[group.group_name] = group
        return Ranks(dist.get_rank(group), dist.get_world_size(group), group.group_name)

    @property
    def process_group(self) -> ProcessGroup:
        return _groups[self.group]


class Exchange:
    """No exchange: this rank holds whole sequences."""

    def parts(self, q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> Iterable[tuple[Any, ...]]:
        """Yield the tensors (B, n, heads, D) as attention takes them, some heads after others."""
        return [(q, k, v, *like_q)]

    def own_heads(self, x: Tensor) -> Tensor:
        """Return the entries of x (H,) for the heads of `parts`, in their order."""
        return x

    def output(self, out: Tensor) -> Tensor:
        """Return attention's output of one part, for the tokens of this rank."""
        return out

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return (B, n, H, D) of all heads, from outputs or gradients of the parts in order."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor, kv_heads: int) -> Triple:
        """Return one part's gradients, for this rank's tokens and `kv_heads` heads of k and v."""
        return dq, dk, dv


WHOLE_ROWS = Exchange()


class Ulysses(Exchange):
    """All tokens of 1/P of the heads. A key-value head goes to every rank with query heads of it.

    Long sequences go in parts of one key-value head per rank, so that little is sent and received
    at a time (UPipe, arXiv 2602.21196).
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def parts(self, q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> Iterable[tuple[Any, ...]]:
        P = self.ranks.count
        # fewer key-value heads than ranks: each rank gets a copy of its own
        copies = kv_copies(q.shape[2], k.shape[2], P)
        k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        slots = [x.unflatten(2, (P, -1)) for x in (q, k, v, *like_q)]
        count = 1 if copies > 1 else ulysses_parts(k.shape[2] // P, q.shape[0] * q.shape[1])
        if count == 1:
            return [self.to_heads(*slots)]
        parts = zip(*(x.chunk(count, dim=3) for x in slots), strict=True)
        # lazily: a part is exchanged when attention has finished the one before
        return (self.to_heads(*part) for part in parts)

    def own_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.ranks.count, -1))[self.ranks.rank]

    def output(self, out: Tensor) -> Tensor:
        return self.to_tokens(out)[0]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        # every part has some heads of each rank
        slots = [x.unflatten(2, (self.ranks.count, -1)) for x in parts]
        return torch.cat(slots, dim=3).flatten(2, 3)

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor, kv_heads: int) -> Triple:
        dq, dk, dv = self.to_tokens(dq, dk, dv)
        # copied heads are all in one part
        copies = max(1, dk.shape[2] // kv_heads)
        if copies > 1:
            dk, dv = (x.unflatten(2, (kv_heads, copies)).float().sum(3) for x in (dk, dv))
        return dq, dk, dv

    def to_heads(self, *slots: Tensor) -> tuple[Tensor, ...]:
        """Turn (B, n, P, heads, ...) of this rank's tokens into (B, N, heads, ...) of its heads."""
        # one message for all tensors: NCCL's latency counts once
        sent = torch.cat(slots, dim=3).movedim(2, 0).contiguous()
        received = all_to_all(sent, self.ranks.group)
        heads = [x.shape[3] for x in slots]
        return received.transpose(0, 1).flatten(1, 2).split(heads, dim=2)

    def to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Turn (B, N, heads, ...) of own heads into (B, n, P · heads, ...) of own tokens."""
        heads = [x.shape[2] for x in tensors]
        sent = torch.cat(tensors, dim=2).unflatten(1, (self.ranks.count, -1)).transpose(0, 1)
        received = all_to_all(sent.contiguous(), self.ranks.group)
        slots = received.movedim(0, 2).split(heads, dim=3)
        return tuple(x.flatten(2, 3) for x in slots)


class AllGather(Exchange):
    """Keys and values of all tokens, for this rank's queries.

    `order` (B or 1, N/C) lists the chunks of C tokens of a sequence in the order of the ranks;
    `inverse` is its inverse. A group of heads takes as much memory as Ulysses would.
    """

    def __init__(self, ranks: Ranks, order: Tensor, inverse: Tensor) -> None:
        self.ranks, self.order, self.inverse = ranks, order, inverse

    def parts(self, q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> Iterable[tuple[Any, ...]]:
        size = allgather_group(k.shape[2], self.ranks.count)
        per_key = q.shape[2] // k.shape[2]
        for first in range(0, k.shape[2], size):
            heads = slice(first, first + size)
            queries = slice(first * per_key, (first + size) * per_key)
            sent = torch.cat([k[:, :, heads], v[:, :, heads]], dim=2)
            ranks = self.ranks.count, self.ranks.group
            yield (
                q[:, :, queries],
                *all_gather_rows(sent, self.order, self.inverse, *ranks).chunk(2, dim=2),
                *(x[:, :, queries] for x in like_q),
            )

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor, kv_heads: int) -> Triple:
        # every rank has a share of all keys' gradients
        both = torch.cat([dk, dv], dim=2)
        dk, dv = sum_rows(both, self.order, self.ranks.count, self.ranks.group).chunk(2, dim=2)
        return dq, dk, dv


class HaloExchange(Exchange):
    """The last `width` keys and values of the rank before, ahead of this rank's own.

    The first rank has none before it and gets zeros, which its mask hides.
    """

    def __init__(self, ranks: Ranks, width: int) -> None:
        self.ranks, self.width = ranks, width

    def parts(self, q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> Iterable[tuple[Any, ...]]:
        if self.width:
            n = k.shape[1]
            # a query sees at most `width` keys of the rank before
            tail = torch.stack([x[:, n - self.width :] for x in (k, v)])
            before = from_neighbour(tail, 1, self.ranks.group)
            k, v = (torch.cat([b, x], dim=1) for b, x in zip(before, (k, v), strict=True))
        return [(q, k, v, *like_q)]

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor, kv_heads: int) -> Triple:
        if not self.width:
            return dq, dk, dv
        w = self.width
        # gradients of the borrowed keys belong to the rank before
        after = from_neighbour(torch.stack([x[:, :w] for x in (dk, dv)]), -1, self.ranks.group)
        dk, dv = (x[:, w:].float() for x in (dk, dv))
        n = dk.shape[1]
        for x, add in zip((dk, dv), after, strict=True):
            x[:, n - w :] += add
        return dq, dk, dv


def in_order(x: Tensor, order: Tensor, chunk: int) -> Tensor:
    """Return (B, m · chunk, ...): x (B, n, ...) by chunks of `chunk` tokens, in the order that
    `order` (B or 1, m) lists them.
    """
    chunks = x.unflatten(1, (-1, chunk))
    if x.shape[0] == 1:
        return chunks[0].index_select(0, order[0]).flatten(0, 1)[None]
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return chunks[rows, order.expand(x.shape[0], -1)].flatten(1, 2)


@torch.library.custom_op("longctx::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """Return (P, ...) of x (P, ...): entry p comes from rank p of `group`."""
    received = torch.empty_like(x)
    with measured():
        dist.all_to_all_single(received, x, group=_groups[group])
    return received


@torch.library.custom_op("longctx::all_gather_rows", mutates_args=())
def all_gather_rows(x: Tensor, order: Tensor, inverse: Tensor, ranks: int, group: str) -> Tensor:
    """Return (B, N, H, D) in the sequence's order, of every rank's x (B, n, H, D)."""
    # the ranks' parts arrive in the order of the ranks
    received = x.new_empty(ranks, *x.shape)
    x = x.contiguous()
    with measured():
        all_gather(received.flatten(0, 1), x, group=_groups[group])
    rows = received.transpose(0, 1).flatten(1, 2)
    return in_order(rows, inverse, rows.shape[1] // inverse.shape[1])


@torch.library.custom_op("longctx::sum_rows", mutates_args=())
def sum_rows(x: Tensor, order: Tensor, ranks: int, group: str) -> Tensor:
    """Return this rank's (B, n, H, D) of the sum of every rank's x (B, N, H, D).

    x is in the sequence's order; the sum is taken in fp32, in the order of the ranks.
    """
    rows = in_order(x, order, x.shape[1] // order.shape[1])
    sent = rows.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    # an all-to-all and a sum of our own: a reduce-scatter adds in any order
    received = torch.empty_like(sent)
    with measured():
        dist.all_to_all_single(received, sent, group=_groups[group])
    return received.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


@torch.library.custom_op("longctx::from_neighbour", mutates_args=())
def from_neighbour(x: Tensor, shift: int, group: str) -> Tensor:
    """Return the x of the rank `shift` (1 or -1) before this one; zeros if there is none."""
    ranks, received = Ranks.of(_groups[group]), torch.zeros_like(x)
    source, target = ([0] * ranks.count for _ in range(2))
    if 0 <= ranks.rank - shift < ranks.count:
        source[ranks.rank - shift] = x.numel()
    if 0 <= ranks.rank + shift < ranks.count:
        target[ranks.rank + shift] = x.numel()
    into, out_of = received.view(-1)[: sum(source)], x.reshape(-1)[: sum(target)]
    with measured():
        dist.all_to_all_single(into, out_of, source, target, group=_groups[group])
    return received


@all_to_all.register_fake
@from_neighbour.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@all_gather_rows.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor, ranks: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0], ranks * x.shape[1], *x.shape[2:])


@sum_rows.register_fake
def _(x: Tensor, order: Tensor, ranks: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // ranks, *x.shape[2:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _save_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, _, ctx.ranks, ctx.group = inputs
    ctx.save_for_backward(order)


def _send_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return all_to_all(gradient.contiguous(), *ctx.arguments), None


def _sum(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return sum_rows(gradient, *ctx.saved_tensors, ctx.ranks, ctx.group), None, None, None, None


def _shift_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    shift, group = ctx.arguments
    return from_neighbour(gradient.contiguous(), -shift, group), None, None


all_to_all.register_autograd(_send_back, setup_context=_save)
all_gather_rows.register_autograd(_sum, setup_context=_save_order)
from_neighbour.register_autograd(_shift_back, setup_context=_save)
