"""Loss by position: what the tokens before a token are worth, in buckets of 1, 2, 4, … tokens of
text before it.

Bucket b holds the tokens with 2^b .. 2^(b+1) - 1 tokens before them. All buckets are those of the
same documents, the ones that reach to the end of the last bucket: else the far buckets would be of
other documents than the near ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FEWEST = 8  # documents that the longest bucket should have


@dataclass
class Positions:
    """Per document the nats in each bucket that it fills."""

    documents: dict[int, list[float]] = field(default_factory=dict)

    def add(self, owner: int, nats: np.ndarray) -> None:
        """Take in -ln p of a document's tokens from its second on, each with everything before it
        as context.
        """
        full = (len(nats) + 1).bit_length() - 1
        if full:
            sums = np.add.reduceat(nats[: 2**full - 1], 2 ** np.arange(full) - 1)
            self.documents[owner] = sums.tolist()

    def buckets(self) -> list[dict[str, Any]]:
        """One row per bucket, up to the longest that `FEWEST` documents fill; of fewer documents,
        that any fills.
        """
        filled = sorted((len(sums) for sums in self.documents.values()), reverse=True)
        if not filled:
            return []
        longest = filled[FEWEST - 1 if len(filled) >= FEWEST else 0]
        chosen = [sums for sums in self.documents.values() if len(sums) >= longest]
        return [
            bucket(b, math.fsum(sums[b] for sums in chosen), len(chosen) * 2**b)
            for b in range(longest)
        ]


def bucket(b: int, nats: float, tokens: int) -> dict[str, Any]:
    """The row of bucket b: positions first .. last, counted in tokens before, and the mean nats of
    the tokens there.
    """
    return {
        "first": 2**b,
        "last": 2 ** (b + 1) - 1,
        "tokens": tokens,
        "nats": nats,
        "loss": nats / tokens,
    }
