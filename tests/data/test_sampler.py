"""The order of samples: shares by weight, every sequence once an epoch, the same after a resume and
on any number of ranks.
"""

from itertools import islice

import numpy as np
import pytest

from longctx.data.rows import SampleStream, permutation

SOURCES = {"one of 1": ([1], [1.0]), "one of 31": ([31], [1.0]), "two": ([5, 13], [1.0, 2.5])}


def interleaved(source: str, seed: int, ranks: int, consumed: int, count: int) -> list[int]:
    """Return the next `count` samples that all ranks take together, in global order."""
    streams = [
        iter(SampleStream(*SOURCES[source], seed, rank, ranks, consumed)) for rank in range(ranks)
    ]
    return [next(streams[sample % ranks]) for sample in range(count)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("consumed", [0, 1, 30, 31, 1000, 7000])
@pytest.mark.parametrize("ranks", [1, 3, 8, 40])
def test_resumed_order_is_the_uninterrupted_one(source, consumed, ranks):
    uninterrupted = list(islice(SampleStream(*SOURCES[source], 9), consumed + 120))
    assert interleaved(source, 9, ranks, consumed, 120) == uninterrupted[consumed:]


@pytest.mark.parametrize("rows", [1, 2, 13, 64])
def test_an_epoch_shows_every_sequence_once(rows):
    samples = list(islice(SampleStream([rows], [1.0], 3), 4 * rows))
    epochs = [samples[epoch * rows : (epoch + 1) * rows] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    if rows > 10:
        assert len({tuple(epoch) for epoch in epochs}) == 4
        assert epochs[0] != list(islice(SampleStream([rows], [1.0], 4), rows))


def test_weights_are_shares_of_sequences():
    rows = np.array(list(islice(SampleStream([5, 13, 400], [1.0, 2.5, 6.5], 0), 20_000)))
    shares = np.bincount(np.searchsorted([5, 18], rows, side="right")) / len(rows)
    assert shares == pytest.approx([0.1, 0.25, 0.65], abs=0.01)
    of_first = rows[rows < 5]
    epochs = of_first[: len(of_first) // 5 * 5].reshape(-1, 5)
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert set(rows.tolist()) == set(range(418))


def test_order_does_not_change_with_a_release():
    assert permutation(8, seed=0, epoch=0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert permutation(8, seed=1337, epoch=2).tolist() == [7, 6, 1, 2, 4, 5, 0, 3]
    mixed = islice(SampleStream([5, 13], [1.0, 2.5], 9), 8)
    assert list(mixed) == [17, 6, 14, 12, 1, 7, 13, 9]
