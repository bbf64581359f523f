"""Loss by position: bucket b holds the targets with 2^b .. 2^(b+1) - 1 tokens of their document
before them.

All buckets are of the same documents, which fill the last bucket: else far buckets would be of
other texts than near ones. Validation and evaluation both add up one document at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

BUCKETS = 32  # documents are shorter than 2^32 tokens
FEWEST = 8  # documents that the longest bucket should have


class LossByPosition:
    """The sums of documents by the number n of buckets that they fill: `sums[n]` is how many they
    are, then their nats in each bucket.
    """

    def __init__(self) -> None:
        self.sums = np.zeros((BUCKETS, 1 + BUCKETS))

    def add(self, nats: np.ndarray, is_target: np.ndarray) -> None:
        """Count a document: -ln p of its tokens from the second on, each scored with all tokens
        before it. It counts up to its first token that is no target.
        """
        gaps = np.flatnonzero(~is_target)
        leading = int(gaps[0]) if len(gaps) else len(is_target)
        full = (leading + 1).bit_length() - 1
        if full:
            starts = 2 ** np.arange(full) - 1
            self.sums[full, 0] += 1
            self.sums[full, 1 : 1 + full] += np.add.reduceat(nats[: 2**full - 1], starts)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per bucket, up to the longest bucket that `FEWEST` documents fill.

        If fewer documents fill any bucket, the longest is that of any document.
        """
        # [n]: sums of the documents that fill n buckets or more
        reaching = self.sums[::-1].cumsum(axis=0)[::-1]
        enough = FEWEST if reaching[1, 0] >= FEWEST else 1
        longest = max((n for n in range(1, BUCKETS) if reaching[n, 0] >= enough), default=0)
        documents, *nats = reaching[longest, : 1 + longest].tolist()
        rows = []
        for bucket, total in enumerate(nats):
            first, tokens = 2**bucket, int(documents) * 2**bucket
            row = {"first": first, "last": 2 * first - 1, "tokens": tokens}
            rows.append(row | {"nats": total, "loss": total / tokens})
        return rows


def error_of_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the standard error of Σ nats / Σ tokens over independent pairs; nan for one pair."""
    # Linearized (Cochran, Sampling Techniques, 1977, 6.4)
    count, total = len(pairs), math.fsum(tokens for _, tokens in pairs)
    if count < 2 or not total:
        return math.nan
    ratio = math.fsum(nats for nats, _ in pairs) / total
    squares = math.fsum((nats - ratio * tokens) ** 2 for nats, tokens in pairs)
    return math.sqrt(count / (count - 1) * squares) / total
