"""Cutting and packing: as few sequences as best-fit decreasing needs. tests/test_fuzz.py checks
that every token is in exactly one sequence.
"""

import numpy as np
import pytest

from longctx.data.packing import best_fit_decreasing


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
