"""The order of training rows, as a pure function of (seed, epoch, samples consumed).

Nothing is remembered between samples, so a run resumed with `consumed` sees what the uninterrupted
one would have seen, on the same or another number of ranks. Own 64-bit mixing instead of a
library's shuffle: the order must not change with a version of numpy or torch. The mixing is
SplitMix64 (Steele, Lea & Flood 2014).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler


def permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `rows` rows in `epoch`, (rows,) int64: rows sorted by a hash of (seed, epoch,
    row).
    """
    return np.argsort(mixed([seed, epoch], np.arange(rows, dtype=np.uint64)), kind="stable")


def mixed(words: Sequence[int], numbers: np.ndarray) -> np.ndarray:
    """(n,) uint64 hashes of (*words, number) for every number (n,) uint64."""
    with np.errstate(over="ignore"):
        key: np.ndarray | np.uint64 = np.uint64(0)
        for word in words:
            key = _mix(key + np.uint64(word % 2**64))
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
        self.rows, self.seed, self.rank, self.world_size, self.consumed = (
            rows,
            seed,
            rank,
            world_size,
            consumed,
        )

    def __iter__(self) -> Iterator[int]:
        sample = self.consumed + self.rank
        while True:
            epoch, position = divmod(sample, self.rows)
            order = permutation(self.rows, self.seed, epoch)
            steps = range(position, self.rows, self.world_size)
            yield from order[steps.start :: self.world_size].tolist()
            sample += len(steps) * self.world_size
