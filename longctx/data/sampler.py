"""The order of training rows, as a pure function of (seed, epoch, samples consumed).

Nothing is remembered between samples, so a run resumed with `consumed` sees what the uninterrupted
one would have seen, on the same or another number of ranks. In a mix, sample g is of the source
that a hash of (seed, g) draws, and of that source the next row of its own endless order. The
hashes are SplitMix64 (Steele, Lea & Flood 2014) rather than a library's shuffle, because the order
must not change with a version of numpy or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

_AHEAD = 1 << 16  # samples whose sources are drawn at one time


def permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `rows` rows in `epoch`, (rows,) int64: rows sorted by a hash of (seed, epoch,
    row).
    """
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
        """The sources of `count` samples from `first` on, (count,) int64."""
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
        """How many of the samples before `end` are of each source."""
        counts = np.zeros(len(self.rows), np.int64)
        for first in range(0, end, 1 << 20):
            drawn = self.sources(first, min(1 << 20, end - first))
            counts += np.bincount(drawn, minlength=len(counts))
        return [int(count) for count in counts]
