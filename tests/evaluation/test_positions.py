"""Loss by position of single documents and of packed rows: the same buckets, the same means."""

import math
from itertools import pairwise

import numpy as np
import pytest

from longctx.evaluation.positions import FEWEST, Filled, Positions, mean_losses, packed_buckets


@pytest.mark.parametrize("lengths", [[9, 4, 1, 16], [70] * FEWEST + [300, 2], [1, 1], [40] * 7])
def test_packed_rows_have_the_means_of_their_documents(lengths: list[int]) -> None:
    """`lengths` in tokens; the last token of each document has no target."""
    nats = np.random.default_rng(0).random(sum(lengths)) * 9
    offsets = np.cumsum([0, *lengths])
    scored = np.ones(sum(lengths), dtype=bool)
    scored[offsets[1:] - 1] = False
    alone = Positions()
    for owner, (begin, end) in enumerate(pairwise(offsets)):
        alone.add(owner, nats[begin : end - 1])

    place, bucket, filled, per_document = packed_buckets(offsets, scored)
    sums = np.zeros((32, 32))
    np.add.at(sums, (filled, bucket), nats[place])
    groups = [Filled(int((per_document == n).sum()), sums[n, :n].tolist()) for n in range(32)]
    rows = mean_losses(groups)
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in alone.buckets()]
    for row, expected in zip(rows, alone.buckets(), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-12)


def test_longest_bucket_is_filled_by_enough_documents() -> None:
    few = [Filled(FEWEST - 1, [1.0] * 5), Filled(1, [1.0] * 3), Filled(4, [1.0])]
    assert len(mean_losses(few)) == 3
    assert len(mean_losses(few[:1])) == 5
    assert mean_losses([Filled(9, [])]) == []
    assert math.fsum(row["nats"] for row in mean_losses(few)) == 6.0
