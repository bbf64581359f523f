"""Documents into rows of a fixed length: cut what is longer, pack the pieces by best-fit
decreasing.

Best-fit decreasing puts each piece, longest first, into the fullest row that still holds it
(Johnson 1973: at most 11/9 of the fewest rows possible). Rows are kept in stacks by what is left in
them, so a million documents take a second. For language models: Ding et al. 2024, arXiv 2404.10830.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Which piece of which document lies where. Row r holds pieces `row_starts[r] : row_starts[r +
    1]`, in order.
    """

    document: np.ndarray  # (pieces,) int64: index of the document
    start: np.ndarray  # (pieces,) int64: first token, counted in the document
    length: np.ndarray  # (pieces,) int64
    row_starts: np.ndarray  # (rows + 1,) int64

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1

    def efficiency(self, seq_len: int) -> float:
        """Share of row positions that hold a document's token rather than padding."""
        return float(self.length.sum()) / (self.rows * seq_len) if self.rows else 1.0

    def save(self, path: Path) -> None:
        np.savez(
            path,
            document=self.document,
            start=self.start,
            length=self.length,
            row_starts=self.row_starts,
        )

    @classmethod
    def load(cls, path: Path) -> Packing:
        with np.load(path) as arrays:
            return cls(
                **{name: arrays[name] for name in ("document", "start", "length", "row_starts")}
            )


def cut(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents of `lengths` tokens into pieces: (document, start, length), each (pieces,)
    int64.

    All pieces of a document but its last are exactly `seq_len` long, the last at most. No tokens:
    no piece.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    count = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), count)
    first_piece = np.cumsum(count) - count
    start = (np.arange(len(document), dtype=np.int64) - first_piece[document]) * seq_len
    return document, start, np.minimum(lengths[document] - start, seq_len)


def best_fit_decreasing(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, int]:
    """Assign pieces of 1..seq_len tokens to rows of `seq_len`: ((pieces,) int64 row of each piece,
    number of rows).

    Deterministic: equal lengths keep their order, and the row opened last is filled first.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)
    whole = int(np.count_nonzero(lengths == seq_len))
    row_of[order[:whole]] = np.arange(whole)
    rows = whole
    left: dict[int, list[int]] = {}  # capacity left -> rows that have exactly this left
    capacities: list[int] = []  # sorted keys of `left`

    for piece, length in zip(
        order[whole:].tolist(), np.asarray(lengths)[order[whole:]].tolist(), strict=True
    ):
        at = bisect_left(capacities, length)
        if at == len(capacities):
            row, capacity, rows = rows, seq_len, rows + 1
        else:
            capacity = capacities[at]
            row = left[capacity].pop()
            if not left[capacity]:
                del left[capacity], capacities[at]
        row_of[piece] = row
        capacity -= length
        if capacity in left:
            left[capacity].append(row)
        elif capacity:
            left[capacity] = [row]
            insort(capacities, capacity)
    return row_of, rows


def pack(lengths: np.ndarray, seq_len: int, documents: np.ndarray | None = None) -> Packing:
    """Cut and pack documents of `lengths` tokens into rows of `seq_len`; `documents` names them
    (default 0, 1, ...).
    """
    document, start, length = cut(lengths, seq_len)
    row_of, rows = best_fit_decreasing(length, seq_len)
    order = np.argsort(row_of, kind="stable")
    row_starts = np.searchsorted(row_of[order], np.arange(rows + 1))
    if documents is not None:
        document = np.asarray(documents, dtype=np.int64)[document]
    return Packing(document[order], start[order], length[order], row_starts.astype(np.int64))
