"""The order of samples: a permutation in each epoch, the same after a resume, and the same on any
number of ranks.
"""

from __future__ import annotations

from itertools import islice

import pytest

from longctx.data.rows import SampleStream, permutation


def interleaved(rows: int, seed: int, world_size: int, consumed: int, count: int) -> list[int]:
    """The next `count` samples that all ranks take together, in global order."""
    streams = [
        iter(SampleStream(rows, seed, rank, world_size, consumed)) for rank in range(world_size)
    ]
    return [next(streams[sample % world_size]) for sample in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 13, 64])
def test_each_epoch_shows_every_row_once_in_another_order(rows: int) -> None:
    samples = interleaved(rows, 3, 1, 0, 4 * rows)
    epochs = [samples[epoch * rows : (epoch + 1) * rows] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    if rows > 10:
        assert len({tuple(epoch) for epoch in epochs}) == 4
        assert epochs[0] != interleaved(rows, 4, 1, 0, rows)


@pytest.mark.parametrize("rows", [1, 5, 31])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 40])
def test_ranks_share_one_global_order(rows: int, world_size: int) -> None:
    assert interleaved(rows, 0, world_size, 0, 200) == interleaved(rows, 0, 1, 0, 200)


@pytest.mark.parametrize("rows", [5, 31])
@pytest.mark.parametrize("consumed", [0, 1, 30, 31, 62, 1000])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_resumed_equals_uninterrupted_also_on_other_ranks(
    rows: int, consumed: int, world_size: int
) -> None:
    uninterrupted = list(islice(SampleStream(rows, 9), consumed + 120))
    assert interleaved(rows, 9, world_size, consumed, 120) == uninterrupted[consumed:]


def test_the_order_does_not_change_with_a_release() -> None:
    assert permutation(8, seed=0, epoch=0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert permutation(8, seed=1337, epoch=2).tolist() == [7, 6, 1, 2, 4, 5, 0, 3]
