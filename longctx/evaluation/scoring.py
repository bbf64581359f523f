"""Losses of windows: rows of windows through the model, forward only, one batch ahead of what is
read back.

B rows of T tokens, T at most the context. The losses of a batch are copied while the next one is
computed, so that a GPU never waits for Python. Logits exist for `model.loss_chunk` tokens at a
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longctx.data.rows import IGNORED, padding_ids
from longctx.evaluation.scorer import Scorer
from longctx.evaluation.windows import Window, batches
from longctx.model.decoder import reading


@dataclass
class Speed:
    """Tokens through the model, padding left out, and the seconds they took; without the first
    batch, which warms up.
    """

    tokens: int = 0
    seconds: float = 0.0
    began: float | None = None

    def add(self, tokens: int) -> None:
        """Count a batch whose losses have been read just now."""
        now = time.perf_counter()
        if self.began is None:
            self.began = now
        else:
            self.tokens, self.seconds = self.tokens + tokens, now - self.began

    @property
    def tokens_per_second(self) -> float | None:
        """None where there was only one batch."""
        return self.tokens / self.seconds if self.seconds else None


def losses(
    scorer: Scorer,
    windows: Iterable[Window],
    context: int,
    rows: int,
    read: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[Window, np.ndarray]]:
    """Yield each window with -ln p of the tokens after its `seen`, (tokens,) float64, in any order;
    0 for a token that is not scored.

    `rows` rows of `context` tokens go through the model at a time, on each data rank. `read` gets
    the tokens of each batch whose losses were read.
    """
    for launched in _in_turn(scorer, batches(windows, context, rows * scorer.data_ranks)):
        yield from launched.read()
        read(launched.tokens)


def _in_turn(scorer: Scorer, every: Iterable[list[list[Window]]]) -> Iterator[_Launched]:
    """Each batch, on a GPU once the next one is launched; a CPU has computed it by then."""
    before: _Launched | None = None
    for batch in every:
        launched = _launch(scorer, batch)
        if scorer.device.type != "cuda":
            yield launched
            continue
        if before is not None:
            yield before
        before = launched
    if before is not None:
        yield before


class _Launched(NamedTuple):
    """A batch on its way; `losses` waits for its (B, T) losses."""

    batch: list[list[Window]]
    losses: Callable[[], Tensor]
    tokens: int

    def read(self) -> Iterator[tuple[Window, np.ndarray]]:
        values = self.losses().double().numpy()
        for b, row in enumerate(self.batch):
            at = 0
            for window in row:
                end = at + len(window.ids) - 1
                yield window, values[b, at + window.seen : end]
                at = end


def _launch(scorer: Scorer, batch: list[list[Window]]) -> _Launched:
    """Send a batch to the model's device and begin on it; waits for nothing there."""
    # Lay the windows side by side in rows.
    B = len(batch)
    T = max(sum(len(window.ids) - 1 for window in row) for row in batch)
    tokens = np.zeros((B, T), dtype=np.int64)
    targets = np.full((B, T), IGNORED, dtype=np.int64)
    doc_ids = np.zeros((B, T), dtype=np.int64)
    count = 0
    for b, row in enumerate(batch):
        at = 0
        for n, window in enumerate(row):
            end = at + len(window.ids) - 1
            tokens[b, at:end] = window.ids[:-1]
            targets[b, at + window.seen : end] = window.ids[1 + window.seen :]
            if window.scored is not None:
                targets[b, at:end][~window.scored[1:]] = IGNORED
            doc_ids[b, at:end] = n
            at = end
        doc_ids[b, at:] = len(row) + padding_ids(T - at).numpy()
        count += at
    # Forward. A row with one window needs no document mask: after it there is only padding, which
    # no token of the window sees, unless the length of the row matters.
    alone = all(len(row) == 1 for row in batch) and not scorer.follows_length
    x, y, ids = (torch.from_numpy(array) for array in (tokens, targets, doc_ids))
    return _Launched(batch, reading(scorer.losses(x, y, None if alone else ids)), count)
