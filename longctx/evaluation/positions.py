"""Loss by position: the value of the tokens before a token, in buckets of 1, 2, 4, … tokens.

Bucket b holds the tokens with 2^b .. 2^(b+1) - 1 tokens of their document before them. All buckets
are of the same documents, which fill the last bucket: otherwise far buckets would be of other
documents than near ones. Evaluation adds up one document at a time (`Positions`), and validation
in training packed sequences (`packed_buckets`). Both average with `mean_losses`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

FEWEST = 8  # documents that the longest bucket should have


class Filled(NamedTuple):
    """The number of documents that fill the buckets 0 .. len(nats) - 1, and their nats in each."""

    documents: float  # a count, as a float because ranks add it up
    nats: Sequence[float]


@dataclass
class Positions:
    """The nats of each document in each bucket that it fills."""

    documents: dict[int, list[float]] = field(default_factory=dict)

    def add(self, owner: int, nats: np.ndarray) -> None:
        """Take in -ln p of a document's tokens from its second on, each scored with all tokens
        before it.
        """
        full = int(filled(len(nats)))
        if full:
            sums = np.add.reduceat(nats[: 2**full - 1], 2 ** np.arange(full) - 1)
            self.documents[owner] = sums.tolist()

    def buckets(self) -> list[dict[str, Any]]:
        """Return a row per bucket; see `mean_losses`."""
        return mean_losses(Filled(1, sums) for sums in self.documents.values())


def filled(targets: Any) -> Any:
    """Return how many buckets so many target tokens of a document fill; counts or arrays."""
    return exponent(targets + 1)


def exponent(counts: Any) -> Any:
    """Return floor(log2) of whole numbers from 1 up: the bucket of a token with so many before."""
    return np.frexp(np.asarray(counts, dtype=np.float64))[1] - 1


def packed_buckets(
    offsets: np.ndarray, scored: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the buckets of target tokens in packed sequences; document n is tokens offsets[n] ..
    offsets[n + 1].

    `scored` (tokens,) marks the targets; a document counts up to its first token that is none.
    Returns, for each target in a bucket that its document fills: its position, its bucket, and how
    many buckets its document fills; and per document how many buckets it fills.
    """
    offsets = offsets.astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    numbers = np.arange(len(scored))
    gaps = np.where(scored, len(scored), numbers)  # positions of the tokens that are no targets
    leading = np.minimum(np.minimum.reduceat(gaps, starts), offsets[1:]) - starts
    full = filled(leading)
    bucket = exponent(numbers - np.repeat(starts, lengths) + 1)
    of_document = np.repeat(full, lengths)
    position = np.flatnonzero(scored & (bucket < of_document))
    return position, bucket[position], of_document[position], full


def mean_losses(groups: Iterable[Filled]) -> list[dict[str, Any]]:
    """Return a row per bucket, up to the longest bucket that `FEWEST` documents fill.

    If fewer documents fill any bucket, the longest is that of any document.
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
    compared = [group for group in groups if len(group.nats) >= longest]
    documents = sum(group.documents for group in compared)
    rows = []
    for bucket in range(longest):
        first, nats = 2**bucket, math.fsum(group.nats[bucket] for group in compared)
        tokens = documents * first
        loss = nats / tokens
        rows.append(
            {"first": first, "last": 2 * first - 1, "tokens": tokens, "nats": nats, "loss": loss}
        )
    return rows
