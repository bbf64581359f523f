"""Cutting and packing: nothing lost, nothing twice, no row too long, and as few rows as best-fit
decreasing needs.
"""

from __future__ import annotations

import numpy as np
import pytest

from longctx.data.packing import Packing, best_fit_decreasing, cut, pack


def lengths_like(kind: str, count: int, seq_len: int) -> np.ndarray:
    rng = np.random.default_rng(count + seq_len)
    if kind == "long":
        return rng.integers(1, 5 * seq_len, count)
    if kind == "short":
        return rng.integers(1, max(2, seq_len // 4), count)
    return np.maximum(rng.lognormal(np.log(seq_len / 3), 1.4, count).astype(np.int64), 0)


CASES = [
    (kind, count, seq_len)
    for kind in ("long", "short", "skewed")
    for count in (1, 7, 211)
    for seq_len in (2, 17, 128, 333)
]


@pytest.mark.parametrize(("kind", "count", "seq_len"), CASES)
def test_every_token_lies_in_exactly_one_row(kind: str, count: int, seq_len: int) -> None:
    lengths = lengths_like(kind, count, seq_len)
    packing = pack(lengths, seq_len)
    covered = [np.zeros(length, np.int64) for length in lengths]
    for document, start, length in zip(
        packing.document, packing.start, packing.length, strict=True
    ):
        assert 1 <= length <= seq_len
        covered[document][start : start + length] += 1
    assert all((tokens == 1).all() for tokens in covered)
    filled = (
        np.add.reduceat(packing.length, packing.row_starts[:-1]) if packing.rows else np.zeros(0)
    )
    assert (filled <= seq_len).all()
    assert packing.efficiency(seq_len) == pytest.approx(
        lengths.sum() / max(1, packing.rows * seq_len), abs=0
    )


def test_only_a_documents_last_piece_is_shorter_than_a_row() -> None:
    document, start, length = cut(np.array([10, 4, 0, 9, 1]), 4)
    assert document.tolist() == [0, 0, 0, 1, 3, 3, 3, 4]
    assert start.tolist() == [0, 4, 8, 0, 0, 4, 8, 0]
    assert length.tolist() == [4, 4, 2, 4, 4, 4, 1, 1]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("seq_len", [13, 100])
def test_rows_are_those_of_the_textbook_algorithm(seed: int, seq_len: int) -> None:
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
    assert sorted(np.bincount(row_of, lengths).tolist()) == sorted(
        seq_len - capacity for capacity in rooms
    )


def test_packing_is_deterministic_and_survives_a_round_trip(tmp_path) -> None:
    lengths = lengths_like("skewed", 211, 64)
    one, two = pack(lengths, 64), pack(lengths, 64)
    one.save(tmp_path / "packing.npz")
    back = Packing.load(tmp_path / "packing.npz")
    for name in ("document", "start", "length", "row_starts"):
        assert (getattr(one, name) == getattr(two, name)).all()
        assert (getattr(one, name) == getattr(back, name)).all()


def test_many_documents_fill_their_rows() -> None:
    lengths = np.random.default_rng(0).integers(2, 16384, 250_000)
    assert pack(lengths, 16384).efficiency(16384) > 0.99
