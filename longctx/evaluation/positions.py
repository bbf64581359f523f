"""Loss by position: what the tokens before a token are worth, in buckets of 1, 2, 4, … tokens.

Bucket b holds the tokens with 2^b .. 2^(b+1) - 1 tokens of their document before them. All buckets
are of the same documents, those that fill the last bucket: otherwise the far buckets would be of
other documents than the near ones. Evaluation adds up one document at a time (`Positions`), and
validation in training packed rows (`packed_buckets`); both average with `mean_losses`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

FEWEST = 8  # documents that the longest bucket should have


class Filled(NamedTuple):
    """Documents that fill the buckets 0 .. len(nats) - 1: how many, and their nats in each."""

    documents: float  # a count, as a float where ranks added it up
    nats: Sequence[float]


@dataclass
class Positions:
    """Per document the nats in each bucket that it fills."""

    documents: dict[int, list[float]] = field(default_factory=dict)

    def add(self, owner: int, nats: np.ndarray) -> None:
        """Take in -ln p of a document's tokens from its second on, each with everything before it
        as context.
        """
        full = int(filled(len(nats)))
        if full:
            sums = np.add.reduceat(nats[: 2**full - 1], 2 ** np.arange(full) - 1)
            self.documents[owner] = sums.tolist()

    def buckets(self) -> list[dict[str, Any]]:
        """One row per bucket; see `mean_losses`."""
        return mean_losses(Filled(1, sums) for sums in self.documents.values())


def filled(targets: Any) -> Any:
    """Buckets that a document with so many scored tokens fills; counts or arrays of them."""
    return exponent(targets + 1)


def exponent(counts: Any) -> Any:
    """floor(log2) of whole numbers from 1 up: the bucket of a token with so many before it."""
    return np.frexp(np.asarray(counts, dtype=np.float64))[1] - 1


def packed_buckets(
    offsets: np.ndarray, scored: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Buckets of the targets in packed rows, of which document n is offsets[n] .. offsets[n + 1].

    `scored` (tokens,) says which targets count; a document counts up to its first one that does
    not. Returns for each target in a bucket that its document fills its place, its bucket and how
    many buckets its document fills, and per document how many buckets it fills.
    """
    offsets = offsets.astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    numbers = np.arange(len(scored))
    gaps = np.where(scored, len(scored), numbers)  # the place of each target that does not count
    run = np.minimum(np.minimum.reduceat(gaps, starts), offsets[1:]) - starts
    full = filled(run)
    bucket = exponent(numbers - np.repeat(starts, lengths) + 1)
    of_document = np.repeat(full, lengths)
    place = np.flatnonzero(scored & (bucket < of_document))
    return place, bucket[place], of_document[place], full


def mean_losses(groups: Iterable[Filled]) -> list[dict[str, Any]]:
    """One row per bucket, up to the longest that `FEWEST` documents fill.

    Where fewer than that fill any bucket, up to the longest that one of them fills.
    """
    groups = [group for group in groups if group.documents and group.nats]
    enough = FEWEST if sum(group.documents for group in groups) >= FEWEST else 1
    longest = 0
    reached: float = 0  # documents that fill `longest` buckets or more
    for group in sorted(groups, key=lambda group: -len(group.nats)):
        longest = len(group.nats)
        reached += group.documents
        if reached >= enough:
            break
    chosen = [group for group in groups if len(group.nats) >= longest]
    count = sum(group.documents for group in chosen)
    return [
        _row(b, math.fsum(group.nats[b] for group in chosen), count * 2**b) for b in range(longest)
    ]


def _row(b: int, nats: float, tokens: int) -> dict[str, Any]:
    """Bucket b: places first .. last, counted in tokens before, and the mean nats there."""
    return {
        "first": 2**b,
        "last": 2 ** (b + 1) - 1,
        "tokens": tokens,
        "nats": nats,
        "loss": nats / tokens,
    }
