"""Documents into sequences of a fixed length: cut longer ones, pack the pieces by best-fit
decreasing.

Best-fit decreasing puts each piece, longest first, into the fullest sequence that still holds it
(Johnson 1973: at most 11/9 of the fewest possible). Sequences are on stacks by the room left in
them, so a million documents take a second. For language models: Ding et al. 2024, arXiv 2404.10830.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Packing:
    """The position of each piece of a document in the sequences.

    Sequence n holds the pieces `bounds[n]` to `bounds[n + 1] - 1`, in order.
    """

    document: np.ndarray  # (pieces,) int64: index of the document
    start: np.ndarray  # (pieces,) int64: first token, counted in the document
    length: np.ndarray  # (pieces,) int64
    bounds: np.ndarray  # (sequences + 1,) int64

    @property
    def sequences(self) -> int:
        return len(self.bounds) - 1

    def save(self, path: Path) -> None:
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> Packing:
        with np.load(path) as arrays:
            return cls(**arrays)


def joined(packings: Sequence[Packing]) -> Packing:
    """Return the sequences of one packing after those of another."""
    names = ("document", "start", "length")
    document, start, length = (np.concatenate([vars(x)[name] for x in packings]) for name in names)
    counts = np.concatenate([[0], *(np.diff(x.bounds) for x in packings)])
    return Packing(document, start, length, np.cumsum(counts, dtype=np.int64))


def cut(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents of `lengths` tokens into pieces: (document, start, length), each (pieces,).

    All pieces of a document but its last are exactly `seq_len` long, the last at most. A document
    without tokens has no piece.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    count = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), count)
    first_piece = np.cumsum(count) - count
    start = (np.arange(len(document), dtype=np.int64) - first_piece[document]) * seq_len
    return document, start, np.minimum(lengths[document] - start, seq_len)


def best_fit_decreasing(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, int]:
    """Assign pieces of 1..seq_len tokens to sequences: the sequence of each, (pieces,) int64, and
    how many there are.

    Deterministic: equal lengths keep their order, and of sequences with equal room the one that was
    filled last is taken.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    # Pieces that fill a sequence alone.
    full = int(np.count_nonzero(lengths == seq_len))
    sequence_of[order[:full]] = np.arange(full)
    sequences = full
    # The others, each into the sequence with the least room that suffices.
    with_room: dict[int, list[int]] = {}  # tokens left → sequences with exactly these
    rooms: list[int] = []  # sorted keys of `with_room`
    shorter = order[full:]
    for piece, length in zip(shorter.tolist(), lengths[shorter].tolist(), strict=True):
        tightest = bisect_left(rooms, length)
        if tightest == len(rooms):
            sequence, room = sequences, seq_len
            sequences += 1
        else:
            room = rooms[tightest]
            sequence = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[tightest]
        sequence_of[piece] = sequence
        room -= length
        if room in with_room:
            with_room[room].append(sequence)
        elif room:
            with_room[room] = [sequence]
            insort(rooms, room)
    return sequence_of, sequences


def pack(
    lengths: np.ndarray,
    seq_len: int,
    documents: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    together: bool = True,
) -> Packing:
    """Cut and pack documents of `lengths` tokens into sequences of `seq_len`, one piece in
    each unless `together`.

    `documents` are their numbers in the result, (documents,); default 0, 1, ...; `starts` the
    tokens of each that come before and are left out, (documents,); default none.
    """
    document, start, length = cut(lengths, seq_len)
    if starts is not None:
        start = start + np.asarray(starts, dtype=np.int64)[document]
    sequence_of, sequences = np.arange(len(length)), len(length)
    if together:
        sequence_of, sequences = best_fit_decreasing(length, seq_len)
    order = np.argsort(sequence_of, kind="stable")
    bounds = np.searchsorted(sequence_of[order], np.arange(sequences + 1))
    if documents is not None:
        document = np.asarray(documents, dtype=np.int64)[document]
    return Packing(document[order], start[order], length[order], bounds.astype(np.int64))
