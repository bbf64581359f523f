"""Context parallelism: the N tokens of a row lie on P ranks, and attention still sees the row.

Everything but attention is token by token, so a rank computes it for its own n = N/P tokens. How
attention sees the others is the business of an `Exchange`.

With Ulysses and in layers with a window, rank r holds n consecutive tokens. For all-gather the row
is cut into chunks, which are dealt so that every rank has about the same number of visible pairs:
the chunks with the most first, in turns of 0 1 .. P-1 and P-1 .. 1 0. A rank holds its chunks in
the order of the row, and so the intervals of its queries do not decrease.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longctx.attention.exchange import AllGather, HaloExchange, Ranks, Ulysses, in_order
from longctx.attention.mask import Mask

CHUNKS = 32  # of a row on each rank, where they are not smaller than a tile
TILE = 128  # tokens
LARGEST = 2048


class Context:
    """The P ranks of `group` that hold one row, and how they exchange it: `method`.

    `fetches_windows`: layers with a window get their keys from the neighbour, which needs a backend
    that takes free intervals. Without a group this rank alone holds whole rows.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        method: str = "ulysses",
        fetches_windows: bool = True,
    ) -> None:
        self.ranks = Ranks() if group is None else Ranks.of(group)
        self.method, self.fetches_windows = method, fetches_windows

    def padded(self, length: int) -> int:
        """The tokens of a row of `length` once P, and chunks that are dealt, divide them."""
        unit = self.ranks.count * self._chunk(length)
        return -(-length // unit) * unit

    def shards(self, mask: Mask, length: int) -> Shards:
        """How rows of `length` tokens, which `padded` leaves as it is, lie on the ranks under
        `mask`, which is bound.
        """
        if self.ranks.count == 1 or self.method == "ulysses":
            return Shards(self, length)
        return Shards(self, length, dealt(mask, length // self._chunk(length), self.ranks.count))

    def _chunk(self, length: int) -> int:
        """Tokens of a chunk of a row of `length`: a power of two."""
        if self.ranks.count == 1 or self.method == "ulysses":
            return 1
        each = length // self.ranks.count
        tokens = max(1, min(LARGEST, max(each // CHUNKS, min(TILE, each // 4))))
        return 1 << (tokens.bit_length() - 1)


class Shards:
    """How the tokens of a batch lie on the ranks: `order` (B or 1, chunks) names the chunks of each
    row rank by rank; without it they lie as in the row.
    """

    def __init__(self, context: Context, length: int, order: Tensor | None = None) -> None:
        self.context, self.ranks, self.length, self.order = context, context.ranks, length, order
        if order is not None:
            self.places = order.argsort(dim=1)
            self.chunk = length // order.shape[1]

    def local(self, x: Tensor) -> Tensor:
        """This rank's part (B, n, ...) of x (B, N, ...)."""
        rank, count = self.ranks.rank, self.ranks.count
        if self.order is not None:
            return in_order(x, self.order.chunk(count, dim=1)[rank], self.chunk)
        n = self.length // count
        return x[:, rank * n : (rank + 1) * n]

    def gathered(self, x: Tensor) -> Tensor:
        """(B, N, ...) of the parts x (B, n, ...) of all ranks; without gradient."""
        if self.ranks.count == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.ranks.count)]
        dist.all_gather(parts, x.detach().contiguous(), group=self.ranks.process_group)
        rows = torch.cat(parts, dim=1)
        return rows if self.order is None else in_order(rows, self.places, self.chunk)

    def at(self, x: Tensor, places: Tensor) -> Tensor:
        """x of whole rows at `places` (B, m): (B, m, C) of the parts x (B, n, C) of all ranks."""
        if self.order is not None:
            chunks = self.places.expand(len(places), -1).gather(1, places // self.chunk)
            places = chunks * self.chunk + places % self.chunk
        n = x.shape[1]
        mine = (places // n == self.ranks.rank)[..., None]
        index = (places % n)[..., None].expand(-1, -1, x.shape[-1])
        chosen = x.gather(1, index)
        if self.ranks.count > 1:
            chosen = torch.where(mine, chosen, 0.0)
            dist.all_reduce(chosen, group=self.ranks.process_group)
        return chosen

    def mask(self, mask: Mask) -> Mask:
        """The mask of a layer for attention after the exchange that suits it, from its `mask` of
        whole rows, which is bound.
        """
        if self.ranks.count == 1:
            return mask
        assert mask.first is not None and mask.last is not None
        if self.order is not None:
            first, last = self.local(mask.first), self.local(mask.last)
            exchange = AllGather(self.ranks, self.order, self.places)
            return Mask.bound(first, last, self.length).exchanged(exchange)
        n = self.length // self.ranks.count
        if not self.context.fetches_windows or mask.window is None or mask.window - 1 > n:
            return mask.exchanged(Ulysses(self.ranks))
        width = mask.window - 1
        before = self.ranks.rank * n - width  # keys of the row ahead of those that this rank gets
        first, last = self.local(mask.first) - before, self.local(mask.last) - before
        return Mask.bound(first, last, width + n).exchanged(HaloExchange(self.ranks, width))


def dealt(mask: Mask, chunks: int, ranks: int) -> Tensor:
    """(B or 1, chunks) int64: which `chunks` of a row each rank holds, rank by rank, each rank's in
    ascending order, so that the ranks are balanced; waits for nothing.
    """
    assert mask.first is not None and mask.last is not None
    pairs = (mask.last - mask.first + 1).clamp(min=0).unflatten(1, (chunks, -1)).sum(2)
    ranked = pairs.argsort(dim=1, descending=True, stable=True).unflatten(1, (-1, ranks))
    rounds = torch.arange(ranked.shape[1], device=ranked.device)[:, None] % 2 == 1
    drafted = torch.where(rounds, ranked.flip(2), ranked)
    return drafted.transpose(1, 2).sort(dim=2).values.flatten(1)
