"""Rows of tokens as a map-style torch data set, put together from the Arrow file when they are
asked for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from longctx.data.packing import Packing
from longctx.data.store import Store

IGNORED = -100  # target that is not scored


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Row i -> tokens, targets, doc_ids, each (seq_len,) int64, and padding, the number of tokens
    that no document fills.

    `targets[t]` is the document's token after `tokens[t]`, also where a row ends before the
    document does; IGNORED at a document's last token, in the padding, and where a conversation is
    not the assistant's. `doc_ids` counts the row's pieces from 0; padding is the last of them.
    """

    def __init__(self, store: Store, packing: Packing, seq_len: int, padding: int):
        self.store, self.packing, self.seq_len, self.padding = store, packing, seq_len, padding

    def __len__(self) -> int:
        return self.packing.rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        tokens = torch.full((self.seq_len,), self.padding)
        targets = torch.full((self.seq_len,), IGNORED)
        doc_ids = torch.empty(self.seq_len, dtype=torch.int64)
        first, last = self.packing.row_starts[row : row + 2].tolist()
        at = 0
        for number, piece in enumerate(range(first, last)):
            document, start = int(self.packing.document[piece]), int(self.packing.start[piece])
            length = int(self.packing.length[piece])
            ids = torch.from_numpy(
                self.store.tokens(document, start, start + length + 1).astype(np.int64)
            )
            tokens[at : at + length] = ids[:length]
            targets[at : at + len(ids) - 1] = ids[1:]
            scored = self.store.scored(document, start + 1, start + length + 1)
            if scored is not None:
                targets[at : at + len(ids) - 1][~torch.from_numpy(scored.copy())] = IGNORED
            doc_ids[at : at + length] = number
            at += length
        doc_ids[at:] = last - first
        return {
            "tokens": tokens,
            "targets": targets,
            "doc_ids": doc_ids,
            "padding": torch.tensor(self.seq_len - at),
        }
