"""Cutting and packing: as few sequences as best-fit decreasing needs. tests/test_fuzz.py checks
that every token is in exactly one sequence.
"""

import numpy as np
import pytest

from longctx.data.packing import best_fit_decreasing, cut, pack


def test_only_the_last_piece_is_short():
    document, start, length = cut(np.array([10, 4, 0, 9, 1]), 4)
    assert document.tolist() == [0, 0, 0, 1, 3, 3, 3, 4]
    assert start.tolist() == [0, 4, 8, 0, 0, 4, 8, 0]
    assert length.tolist() == [4, 4, 2, 4, 4, 4, 1, 1]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("seq_len", [13, 100])
def test_packing_is_the_textbook_algorithm(seed, seq_len):
    lengths = np.random.default_rng(seed).integers(1, seq_len + 1, 150)
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row, capacity in enumerate(rooms) if capacity >= length]
        if fitting:
            rooms[min(fitting, key=lambda row: rooms[row])] -= length
        else:
            rooms.append(seq_len - length)
    row_of, rows = best_fit_decreasing(lengths, seq_len)
    assert rows == len(rooms)
    filled = np.bincount(row_of, lengths).tolist()
    assert sorted(filled) == sorted(seq_len - capacity for capacity in rooms)


def test_many_documents_fill_their_sequences():
    lengths = np.random.default_rng(0).integers(2, 16384, 250_000)
    assert pack(lengths, 16384).efficiency(16384) > 0.99
