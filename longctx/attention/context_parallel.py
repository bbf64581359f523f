"""Context parallelism: P ranks share a sequence of N tokens, and attention still sees all of it.

Everything but attention is token by token, so a rank computes it for its own n = N/P tokens. An
`Exchange` brings attention the other ranks' tokens.

With Ulysses and in layers with a window, rank r holds n consecutive tokens. All-gather cuts the
sequence into chunks and deals them, so that every rank has about the same number of visible pairs:
the chunks with the most pairs first, in turns of 0 1 .. P-1 and P-1 .. 1 0. A rank holds its chunks
in the order of the sequence, and so the intervals of its queries do not decrease.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from longctx.attention.exchange import AllGather, HaloExchange, Ranks, Ulysses, in_order
from longctx.attention.mask import Mask

CHUNKS = 32  # of a sequence on each rank, unless they would be smaller than a tile
TILE = 128  # tokens
LARGEST = 2048


class Context:
    """The P ranks of `group` that share each sequence, and their `method` of exchange.

    `fetches_windows`: layers with a window get their keys from the neighbour, if the backend takes
    free intervals. Without a group this rank alone holds whole sequences.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        method: str = "ulysses",
        fetches_windows: bool = True,
    ) -> None:
        self.ranks = Ranks() if group is None else Ranks.of(group)
        self.method, self.fetches_windows = method, fetches_windows

    def shards(self, mask: Mask, length: int) -> Shards:
        """Return the ranks' shares of sequences of a `padded` length under the bound `mask`."""
        if self.ranks.count == 1 or self.method == "ulysses":
            return Shards(self, length)
        chunk = chunk_of(length, self.ranks.count, self.method)
        return Shards(self, length, dealt(mask, length // chunk, self.ranks.count))


def padded(length: int, ranks: int, method: str) -> int:
    """Return `length` rounded up, so that the number of ranks and the chunks divide it."""
    unit = ranks * chunk_of(length, ranks, method)
    return -(-length // unit) * unit


def chunk_of(length: int, ranks: int, method: str) -> int:
    """Return the tokens of a chunk of a sequence of `length`: a power of two."""
    if ranks == 1 or method == "ulysses":
        return 1
    each = length // ranks
    # small chunks balance the ranks, large ones keep tiles whole
    tokens = max(1, min(LARGEST, max(each // CHUNKS, min(TILE, each // 4))))
    return 1 << (tokens.bit_length() - 1)


class Shards:
    """The ranks' shares of a batch: `order` (B or 1, chunks) lists each sequence's chunks rank by
    rank; without it every rank has consecutive tokens.
    """

    def __init__(self, context: Context, length: int, order: Tensor | None = None) -> None:
        self.context, self.ranks, self.length, self.order = context, context.ranks, length, order
        if order is not None:
            self.inverse = order.argsort(dim=1)
            self.chunk = length // order.shape[1]

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part (B, n, ...) of x (B, N, ...)."""
        rank, count = self.ranks.rank, self.ranks.count
        if self.order is not None:
            return in_order(x, self.order.chunk(count, dim=1)[rank], self.chunk)
        n = self.length // count
        return x[:, rank * n : (rank + 1) * n]

    def gathered(self, x: Tensor) -> Tensor:
        """Return (B, N, ...) of the parts x (B, n, ...) of all ranks."""
        # Every rank must compute the same from it; then each knows the gradients of all.
        if self.ranks.count == 1:
            return x
        whole: Tensor = _Gathered.apply(x, self)
        return whole

    def at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return (B, m, C) of all ranks' x (B, n, C), at `positions` (B, m) of the sequences."""
        if self.order is not None:
            chunks = self.inverse.expand(len(positions), -1).gather(1, positions // self.chunk)
            positions = chunks * self.chunk + positions % self.chunk
        n = x.shape[1]
        index = (positions % n)[..., None].expand(-1, -1, x.shape[-1])
        values = x.gather(1, index)
        if self.ranks.count > 1:
            # each position is on one rank, so the sum over ranks is its value
            is_mine = (positions // n == self.ranks.rank)[..., None]
            values = torch.where(is_mine, values, 0.0)
            dist.all_reduce(values, group=self.ranks.process_group)
        return values

    def mask(self, mask: Mask) -> Mask:
        """Return a layer's mask with its exchange, from the bound `mask` of whole sequences."""
        if self.ranks.count == 1:
            return mask
        assert mask.first is not None and mask.last is not None
        if self.order is not None:
            first, last = self.local(mask.first), self.local(mask.last)
            exchange = AllGather(self.ranks, self.order, self.inverse)
            return Mask.bound(first, last, self.length).exchanged(exchange)
        n = self.length // self.ranks.count
        if not self.context.fetches_windows or mask.window is None or mask.window - 1 > n:
            return mask.exchanged(Ulysses(self.ranks))
        # this rank's keys begin `width` before its own tokens
        width = mask.window - 1
        before = self.ranks.rank * n - width
        first, last = self.local(mask.first) - before, self.local(mask.last) - before
        return Mask.bound(first, last, width + n).exchanged(HaloExchange(self.ranks, width))


def dealt(mask: Mask, chunks: int, ranks: int) -> Tensor:
    """Return (B or 1, chunks) int64: each rank's chunks, ascending, rank by rank."""
    # Every rank gets about as many visible pairs. Nothing waits for the device.
    assert mask.first is not None and mask.last is not None
    pairs = (mask.last - mask.first + 1).clamp(min=0).unflatten(1, (chunks, -1)).sum(2)
    # a draft in turns: every second round goes backwards
    ranked = pairs.argsort(dim=1, descending=True, stable=True).unflatten(1, (-1, ranks))
    is_backwards = torch.arange(ranked.shape[1], device=ranked.device)[:, None] % 2 == 1
    drafted = torch.where(is_backwards, ranked.flip(2), ranked)
    return drafted.transpose(1, 2).sort(dim=2).values.flatten(1)


class _Gathered(torch.autograd.Function):
    """The parts of all ranks. A part's gradient is the sum over the ranks, whose gradients are
    equal.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        parts = [torch.empty_like(x) for _ in range(shards.ranks.count)]
        dist.all_gather(parts, x.contiguous(), group=shards.ranks.process_group)
        whole = torch.cat(parts, dim=1)
        return whole if shards.order is None else in_order(whole, shards.inverse, shards.chunk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.shards.local(grad) * ctx.shards.ranks.count, None
