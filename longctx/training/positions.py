"""Loss by position: bucket b holds the targets with 2^b .. 2^(b+1) - 1 tokens of their document
before them.

All buckets are of the same documents, which fill the last bucket: else far buckets would be of
other texts than near ones. Evaluation adds up one document at a time (`bucket_sums`), validation
packed sequences (`packed_buckets`). Both average with `mean_losses`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

FEWEST = 8  # documents that the longest bucket should have


class Filled(NamedTuple):
    """The number of documents that fill the buckets 0 .. len(nats) - 1, and their nats in each."""

    documents: float  # a count, as a float because ranks add it up
    nats: Sequence[float]


def bucket_sums(nats: np.ndarray) -> list[float]:
    """Return the sum of each bucket that a document fills; `nats` are -ln p of its tokens from the
    second on, each scored with all tokens before it.
    """
    full = int(exponent(len(nats) + 1))
    starts = 2 ** np.arange(full) - 1
    return np.add.reduceat(nats[: 2**full - 1], starts).tolist() if full else []


def exponent(counts: Any) -> Any:
    """Return floor(log2) of whole numbers from 1 up: the bucket of a token with so many before, and
    the buckets that a document of so many tokens fills.
    """
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
    full = exponent(leading + 1)
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


def error_of_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the standard error of Σ nats / Σ tokens over independent pairs; nan for one pair.

    Linearized (Cochran, Sampling Techniques, 1977, 6.4).
    """
    count, total = len(pairs), math.fsum(tokens for _, tokens in pairs)
    if count < 2 or not total:
        return math.nan
    ratio = math.fsum(nats for nats, _ in pairs) / total
    squares = math.fsum((nats - ratio * tokens) ** 2 for nats, tokens in pairs)
    return math.sqrt(count / (count - 1) * squares) / total
