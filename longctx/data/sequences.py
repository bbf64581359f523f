"""Sequences of tokens as a map-style torch data set, and the order in which training sees them.

A sequence is assembled from the Arrow file on access. The order is a pure function of (seed, epoch,
samples consumed). Nothing is remembered between samples, so a resumed run continues as the
uninterrupted one, on the same or another number of ranks. A hash of (seed, g) draws the source of
sample g, and the sample is the next sequence in that source's own endless order. The hashes are
SplitMix64 (Steele, Lea & Flood 2014), because a library's shuffle may change with its version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from longctx.data.packing import Packing
from longctx.data.preferences import SIDES, shortened
from longctx.data.split import splitmix
from longctx.data.store import Store

IGNORED = -100  # not a target token
PADDING_PIECE = 128  # tokens; attention's time grows with the square of a document
# Samples whose sources are drawn at one time: 1.4 ms, and 1 s one by one.
_DRAWN = 1 << 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(eq=False)
class PackedSequences(Dataset[dict[str, torch.Tensor]]):
    """Sequence i -> tokens, targets, doc_ids, each (seq_len,) int64, and padding, a token count.

    `targets[t]` is the document's token after `tokens[t]`, even if a sequence ends before the
    document; IGNORED at a document's last token, in the padding, and outside of the assistant's
    part of a conversation. `doc_ids` numbers the pieces from 0, then those of the padding.
    `padding` counts the tokens at the end that no document fills; they are `pad_id`.

    Of answers that are compared, document n of the sequence has the doc_ids SIDES · n + side. Then
    `documents` has their numbers in the store, and `reference` (documents, SIDES) float32 what the
    reference says of them, if there is one.
    """

    store: Store
    packing: Packing
    seq_len: int
    pad_id: int
    bos_id: int | None
    reference: np.ndarray | None  # (documents, SIDES), see `SourcePart.reference`

    def __len__(self) -> int:
        return self.packing.sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        tokens = np.full(self.seq_len, self.pad_id)
        targets = np.full(self.seq_len, IGNORED)
        doc_ids = np.empty(self.seq_len, np.int64)
        first, last = self.packing.bounds[index : index + 2].tolist()
        sides = SIDES if self.store.has_sides else 1
        filled = 0
        for number, piece in enumerate(range(first, last)):
            own = slice(filled, filled + int(self.packing.length[piece]))
            tokens[own], targets[own], side = self._piece(piece)
            doc_ids[own] = sides * number + side
            filled = own.stop
        padding = self.seq_len - filled
        doc_ids[filled:] = sides * (last - first) + padding_ids(padding).numpy()
        sequence = {
            "tokens": torch.from_numpy(tokens),
            "targets": torch.from_numpy(targets),
            "doc_ids": torch.from_numpy(doc_ids),
            "padding": torch.tensor(padding),
        }
        # By these, objectives find what belongs to an answer
        documents = self.packing.document[first:last]
        if self.store.has_sides:
            sequence["documents"] = torch.from_numpy(documents)
        if self.reference is not None:
            sequence["reference"] = torch.from_numpy(self.reference[documents])
        return sequence

    def _piece(self, piece: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, targets and sides of a piece, (length,) each."""
        document = int(self.packing.document[piece])
        start, length = int(self.packing.start[piece]), int(self.packing.length[piece])
        targets = np.full(length, IGNORED)
        if self.store.has_sides:
            # All of a pair stays in one sequence, shortened if need be. The last token of a side
            # predicts none, since the first of the next one is never learned.
            ids, marks = shortened(self.store, document, length, self.bos_id)
            targets[:-1] = ids[1:]
            targets[:-1][marks[1:] & 1 == 0] = IGNORED
            return ids, targets, marks.astype(np.int64) >> 1
        # One token more than the piece shows: it is the target of the last one.
        ids = self.store.tokens(document, start, start + length + 1)
        targets[: len(ids) - 1] = ids[1:]
        scored = self.store.scored(document, start + 1, start + length + 1)
        if scored is not None:
            targets[: len(scored)][~scored] = IGNORED
        return ids[:length], targets, np.zeros(length, np.int64)


def padding_ids(padding: int) -> torch.Tensor:
    """Return the number of its piece, from 0, for each token of padding, (padding,) int64."""
    return torch.arange(padding) // PADDING_PIECE


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the `count` sequences of `epoch`, int64, sorted by a hash of (seed, epoch, number)."""
    return np.argsort(hashed([seed, epoch], np.arange(count, dtype=np.uint64)), kind="stable")


def hashed(prefix: Sequence[int], numbers: np.ndarray) -> np.ndarray:
    """Hash (*prefix, number) for every number (n,) uint64, to (n,) uint64."""
    with np.errstate(over="ignore"):
        key: np.ndarray | np.uint64 = np.uint64(0)
        for number in prefix:
            key = splitmix(key + np.uint64(number % 2**64) + _GOLDEN)
        return splitmix(key + numbers + _GOLDEN)


@dataclass(eq=False)
class SampleStream(Sampler[int]):
    """Endless stream of the numbers of sequences; each sample's source is drawn by `weights`.

    counts: the sequences of each source, numbered through. Sample g of a source is number
    `permutation(count, seed, g // count)[g % count]` in it. Rank r of `world_size` takes the
    samples consumed + r, consumed + r + world_size, ...; `consumed` counts the samples that all
    ranks together have taken.
    """

    counts: Sequence[int]
    weights: Sequence[float]
    seed: int
    rank: int = 0
    world_size: int = 1
    consumed: int = 0

    def __post_init__(self) -> None:
        # A hash below bounds[i] draws source i. Floats near 2^64 are 2048 apart.
        share = np.cumsum(np.asarray(self.weights, dtype=np.float64) / sum(self.weights))
        self.bounds = np.minimum(share * 2.0**64, float(2**64 - 2048)).astype(np.uint64)
        self.bounds[-1] = np.iinfo(np.uint64).max
        self.starts = np.cumsum([0, *self.counts])

    def sources(self, first: int, count: int) -> np.ndarray:
        """Return the sources of `count` samples from `first` on, (count,) int64."""
        keys = hashed([self.seed, 0x6D6978], np.arange(first, first + count, dtype=np.uint64))
        return np.searchsorted(self.bounds, keys, side="left")

    def __iter__(self) -> Iterator[int]:
        used = self._before(self.consumed)
        orders: list[tuple[int, np.ndarray]] = [(-1, np.zeros(0, np.int64)) for _ in self.counts]
        first = self.consumed
        while True:
            for offset, source in enumerate(self.sources(first, _DRAWN).tolist()):
                count = self.counts[source]
                epoch, position = divmod(used[source], count)
                # Every rank counts all samples, so each knows the others' without asking.
                used[source] += 1
                if (first + offset - self.consumed) % self.world_size != self.rank:
                    continue
                if orders[source][0] != epoch:
                    # With seeds of their own, sources of one size have orders of their own.
                    orders[source] = (epoch, permutation(count, self.seed + source, epoch))
                yield int(self.starts[source] + orders[source][1][position])
            first += _DRAWN

    def _before(self, end: int) -> list[int]:
        """Count the samples before `end` from each source."""
        if len(self.counts) == 1:
            return [end]
        counts = np.zeros(len(self.counts), np.int64)
        for first in range(0, end, _DRAWN):
            drawn = self.sources(first, min(_DRAWN, end - first))
            counts += np.bincount(drawn, minlength=len(counts))
        return [int(count) for count in counts]
