"""Rows of tokens as a map-style torch data set, and the order in which training sees them.

A row is assembled from the Arrow file on access. The order is a pure function of (seed, epoch,
samples consumed). Nothing is remembered between samples, so a resumed run continues as the
uninterrupted one, on the same or another number of ranks. In a mix, a hash of (seed, g) draws the
source of sample g, and the sample is the next row in that source's own endless order. The hashes
are SplitMix64 (Steele, Lea & Flood 2014), because a library's shuffle may change with its version.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from longctx.data.packing import Packing
from longctx.data.store import Store

IGNORED = -100  # target that is not scored
_AHEAD = 1 << 16  # samples whose sources are drawn at one time
PADDING_PIECE = 128  # tokens; attention's time grows with the square of a document


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Row i -> tokens, targets, doc_ids, each (seq_len,) int64, and padding, a count of tokens.

    `targets[t]` is the document's token after `tokens[t]`, even if a row ends before the
    document; IGNORED at a document's last token, in the padding, and where a conversation is
    not the assistant's. `doc_ids` numbers the row's pieces from 0, then those of its padding.
    `padding` tells how many tokens of the row no document fills; there stands token `pad_id`.
    """

    def __init__(self, store: Store, packing: Packing, seq_len: int, pad_id: int):
        self.store = store
        self.packing = packing
        self.seq_len = seq_len
        self.pad_id = pad_id

    def __len__(self) -> int:
        return self.packing.rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if row >= len(self):
            raise IndexError(row)
        tokens = torch.full((self.seq_len,), self.pad_id)
        targets = torch.full((self.seq_len,), IGNORED)
        doc_ids = torch.empty(self.seq_len, dtype=torch.int64)
        first, last = self.packing.row_starts[row : row + 2].tolist()
        at = 0
        for number, piece in enumerate(range(first, last)):
            document = int(self.packing.document[piece])
            start = int(self.packing.start[piece])
            length = int(self.packing.length[piece])
            following = self.store.tokens(document, start, start + length + 1)
            ids = torch.from_numpy(following.astype(np.int64))
            tokens[at : at + length] = ids[:length]
            targets[at : at + len(ids) - 1] = ids[1:]
            scored = self.store.scored(document, start + 1, start + length + 1)
            if scored is not None:
                targets[at : at + len(ids) - 1][~torch.from_numpy(scored.copy())] = IGNORED
            doc_ids[at : at + length] = number
            at += length
        doc_ids[at:] = last - first + padding_ids(self.seq_len - at)
        return {
            "tokens": tokens,
            "targets": targets,
            "doc_ids": doc_ids,
            "padding": torch.tensor(self.seq_len - at),
        }


def padding_ids(padding: int) -> torch.Tensor:
    """Return the number of its piece, from 0, for each token of padding, (padding,) int64."""
    return torch.arange(padding) // PADDING_PIECE


class Joined(Dataset[dict[str, torch.Tensor]]):
    """Rows of several data sets, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)]).tolist()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if row >= len(self):
            raise IndexError(row)
        part = bisect_right(self.starts, row) - 1
        tensors: dict[str, torch.Tensor] = self.parts[part][row - self.starts[part]]
        return tensors


def permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the rows of `epoch`, (rows,) int64, sorted by a hash of (seed, epoch, row)."""
    return np.argsort(hashed([seed, epoch], np.arange(rows, dtype=np.uint64)), kind="stable")


def hashed(prefix: Sequence[int], numbers: np.ndarray) -> np.ndarray:
    """Hash (*prefix, number) for every number (n,) uint64, to (n,) uint64."""
    with np.errstate(over="ignore"):
        key: np.ndarray | np.uint64 = np.uint64(0)
        for number in prefix:
            key = _mix(key + np.uint64(number % 2**64))
        return _mix(key + numbers)


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    z = np.asarray(x, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class SampleStream(Sampler[int]):
    """Endless stream of row numbers: sample g is row `permutation(rows, seed, g // rows)[g %
    rows]`.

    Rank r of `world_size` takes g = consumed + r, consumed + r + world_size, ...; `consumed` counts
    the samples that all ranks together have taken. Raises ValueError for no rows or a rank outside
    the world.
    """

    def __init__(self, rows: int, seed: int, rank: int = 0, world_size: int = 1, consumed: int = 0):
        if rows < 1:
            raise ValueError(f"rows={rows}: there is nothing to sample from")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: not one of {world_size} ranks")
        if consumed < 0:
            raise ValueError(f"consumed={consumed}: use a count from 0 up")
        self.rows = rows
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.consumed = consumed

    def __iter__(self) -> Iterator[int]:
        sample = self.consumed + self.rank
        while True:
            epoch, position = divmod(sample, self.rows)
            order = permutation(self.rows, self.seed, epoch)
            steps = range(position, self.rows, self.world_size)
            yield from order[steps.start :: self.world_size].tolist()
            sample += len(steps) * self.world_size


class MixStream(Sampler[int]):
    """Endless stream of row numbers of joined sources with `rows` rows each, drawn by `weights`.

    Rank r of `world_size` takes the samples consumed + r, consumed + r + world_size, …, as
    `SampleStream` does.
    """

    def __init__(
        self,
        rows: Sequence[int],
        weights: Sequence[float],
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        consumed: int = 0,
    ):
        SampleStream(min(rows), seed, rank, world_size, consumed)  # the same checks
        self.rows = list(rows)
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.consumed = consumed
        share = np.cumsum(np.asarray(weights, dtype=np.float64) / sum(weights))
        self.bounds = np.minimum(share * 2.0**64, float(2**64 - 2048)).astype(np.uint64)
        self.bounds[-1] = np.iinfo(np.uint64).max
        self.starts = np.cumsum([0, *rows])

    def sources(self, first: int, count: int) -> np.ndarray:
        """Return the sources of `count` samples from `first` on, (count,) int64."""
        keys = hashed([self.seed, 0x6D6978], np.arange(first, first + count, dtype=np.uint64))
        return np.searchsorted(self.bounds, keys, side="left")

    def __iter__(self) -> Iterator[int]:
        used = self._before(self.consumed)
        orders: list[tuple[int, np.ndarray]] = [(-1, np.zeros(0, np.int64)) for _ in self.rows]
        first = self.consumed
        while True:
            for offset, source in enumerate(self.sources(first, _AHEAD).tolist()):
                epoch, position = divmod(used[source], self.rows[source])
                used[source] += 1
                if (first + offset - self.consumed) % self.world_size != self.rank:
                    continue
                if orders[source][0] != epoch:
                    orders[source] = (
                        epoch,
                        permutation(self.rows[source], self.seed + source, epoch),
                    )
                yield int(self.starts[source] + orders[source][1][position])
            first += _AHEAD

    def _before(self, end: int) -> list[int]:
        """Count the samples before `end` from each source."""
        counts = np.zeros(len(self.rows), np.int64)
        for first in range(0, end, 1 << 20):
            drawn = self.sources(first, min(1 << 20, end - first))
            counts += np.bincount(drawn, minlength=len(counts))
        return [int(count) for count in counts]
