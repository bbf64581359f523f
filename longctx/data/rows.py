"""Rows of tokens as a map-style torch data set, assembled from the Arrow file on access."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from longctx.data.packing import Packing
from longctx.data.store import Store

IGNORED = -100  # target that is not scored
PADDING_PIECE = 128  # tokens; attention's time grows with the square of a document


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Row i -> tokens, targets, doc_ids, each (seq_len,) int64, and padding, a count of tokens.

    `targets[t]` is the document's token after `tokens[t]`, also where a row ends before the
    document does; IGNORED at a document's last token, in the padding, and where a conversation is
    not the assistant's. `doc_ids` numbers the row's pieces from 0, then those of its padding.
    `padding` tells how many tokens of the row no document fills; there stands token `pad_id`.
    """

    def __init__(self, store: Store, packing: Packing, seq_len: int, pad_id: int):
        self.store = store
        self.packing = packing
        self.seq_len = seq_len
        self.pad_id = pad_id

    def __len__(self) -> int:
        return self.packing.rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        tokens = torch.full((self.seq_len,), self.pad_id)
        targets = torch.full((self.seq_len,), IGNORED)
        doc_ids = torch.empty(self.seq_len, dtype=torch.int64)
        first, last = self.packing.row_starts[row : row + 2].tolist()
        at = 0
        for number, piece in enumerate(range(first, last)):
            document = int(self.packing.document[piece])
            start = int(self.packing.start[piece])
            length = int(self.packing.length[piece])
            following = self.store.tokens(document, start, start + length + 1)
            ids = torch.from_numpy(following.astype(np.int64))
            tokens[at : at + length] = ids[:length]
            targets[at : at + len(ids) - 1] = ids[1:]
            scored = self.store.scored(document, start + 1, start + length + 1)
            if scored is not None:
                targets[at : at + len(ids) - 1][~torch.from_numpy(scored.copy())] = IGNORED
            doc_ids[at : at + length] = number
            at += length
        doc_ids[at:] = last - first + padding_ids(self.seq_len - at)
        return {
            "tokens": tokens,
            "targets": targets,
            "doc_ids": doc_ids,
            "padding": torch.tensor(self.seq_len - at),
        }


def padding_ids(padding: int) -> torch.Tensor:
    """Number of its piece, from 0, for each token of the padding at the end of a row: (padding,)
    int64.
    """
    return torch.arange(padding) // PADDING_PIECE


class Joined(Dataset[dict[str, torch.Tensor]]):
    """Rows of several data sets, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)]).tolist()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        part = bisect_right(self.starts, row) - 1
        tensors: dict[str, torch.Tensor] = self.parts[part][row - self.starts[part]]
        return tensors
