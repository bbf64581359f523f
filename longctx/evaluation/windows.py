"""Windows: the pieces of documents that the model reads, packed into sequences, and their losses.

Window k of a document shows the tokens k·stride .. k·stride + context - 1. It scores the tokens
that no window before it has scored. So a token has context - stride + 1 tokens before it, or all
of its document's. Windows shorter than the context share a sequence, kept apart by the attention
mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longctx.config.fields import refuse
from longctx.data.dataset import EncodedDocument
from longctx.data.packing import pack
from longctx.data.sequences import IGNORED, padding_ids
from longctx.evaluation.score import Asked, OnBatch, Scorer

# Batches that are packed together, and sequences at least: more waste less of each sequence.
AHEAD = (4, 32)
# (B, T) losses on the CPU, once a GPU has reached the event
Launched = tuple[Tensor, torch.cuda.Event | None]


class Window(NamedTuple):
    """ids (length + 1,), the last only as a target; the first `seen` targets are not scored here.

    `begin` is the position of ids[0] in document number `owner`. `context` is 0, unless the window
    scores tokens a second time: then it is the context that they get. `scored` (length + 1,) bool
    marks the target tokens if not all are; the losses of the others are 0.
    """

    owner: int
    begin: int
    ids: np.ndarray
    seen: int
    context: int = 0
    scored: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Return the tokens that the model reads."""
        return len(self.ids) - 1

    @property
    def is_target(self) -> np.ndarray:
        """Mark the tokens (length,) whose next token is scored here."""
        is_new = np.arange(self.length) >= self.seen
        return is_new if self.scored is None else is_new & self.scored[1:]


def stride_of(stride: int | None, context: int) -> int:
    """Return the stride, by default half of the context; ValueError if it leaves tokens out."""
    stride = max(1, context // 2) if stride is None else stride
    problem = f"stride={stride}: tokens between two windows would never be scored"
    refuse((not 1 <= stride <= context, f"{problem}; give 1 to seq_len={context}"))
    return stride


def spans(tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, first): a window reads tokens begin .. end - 1, scores first .. end."""
    begin, first = 0, 1
    while first < tokens:
        end = min(begin + context, tokens - 1)
        yield begin, end, first
        begin, first = begin + stride, end + 1


def sliding(owner: int, document: EncodedDocument, context: int, stride: int) -> Iterator[Window]:
    """Yield the windows that score every target token of a document once."""
    for begin, end, first in spans(len(document.ids), context, stride):
        window = window_of(owner, document, begin, end, first - begin - 1)
        if window.is_target.any():
            yield window


def window_of(
    owner: int, document: EncodedDocument, begin: int, end: int, seen: int, context: int = 0
) -> Window:
    """Return the window that reads the tokens begin .. end - 1 and scores the last one at `end`."""
    scored = None if document.scored is None else document.scored[begin : end + 1]
    return Window(owner, begin, document.ids[begin : end + 1], seen, context, scored)


def batches(
    windows: Iterable[Window], context: int, sequences: int, packs: bool = True
) -> Iterator[list[list[Window]]]:
    """Yield batches of at most `sequences` sequences of at most `context` tokens; unless it `packs`
    windows, each has a sequence of its own.
    """
    # Windows are read only a little ahead
    together = max(AHEAD[0] * sequences, AHEAD[1]) * context
    waiting: list[Window] = []
    tokens = 0
    for window in windows:
        waiting.append(window)
        tokens += window.length
        if tokens >= together:
            packed = _packed(waiting, context, packs)
            # The other half, of short windows, fills sequences to come.
            full = max(len(packed) // 2 // sequences * sequences, sequences)
            for start in range(0, full, sequences):
                yield packed[start : start + sequences]
            waiting = [window for sequence in packed[full:] for window in sequence]
            tokens = sum(window.length for window in waiting)
    packed = _packed(waiting, context, packs)
    for start in range(0, len(packed), sequences):
        yield packed[start : start + sequences]


def _packed(windows: list[Window], context: int, packs: bool) -> list[list[Window]]:
    """Return sequences of at most `context` tokens, in each the longest window first."""
    windows = sorted(windows, key=lambda window: -window.length)
    lengths = np.array([window.length for window in windows], np.int64)
    packing = pack(lengths, context, together=packs)
    return [
        [windows[index] for index in packing.document[first:end].tolist()]
        for first, end in pairwise(packing.bounds.tolist())
    ]


def losses(
    scorer: Scorer,
    windows: Iterable[Window],
    context: int,
    batch_size: int,
    on_batch: OnBatch = lambda tokens: None,
) -> Iterator[tuple[Window, np.ndarray]]:
    """Yield each window with -ln p of the tokens after its `seen`, (tokens,) float64, in any order.

    The loss of a token that is no target is 0. `batch_size` sequences of `context` tokens go
    through the model at a time, on each data rank. `on_batch` gets the tokens of each batch that
    is done, without padding.
    """
    launched: deque[tuple[list[list[Window]], Launched]] = deque()
    ahead = int(scorer.device.type == "cuda")
    for batch in batches(windows, context, batch_size * scorer.data_ranks, scorer.packs):
        launched.append((batch, _launch(scorer, batch)))
        # A GPU computes this batch while Python reads the losses of the one before
        if len(launched) > ahead:
            yield from _read(*launched.popleft(), on_batch)
    for batch_and_wait in launched:
        yield from _read(*batch_and_wait, on_batch)


def _read(
    batch: list[list[Window]], launched: Launched, on_batch: OnBatch
) -> Iterator[tuple[Window, np.ndarray]]:
    losses, copied = launched
    if copied is not None:
        copied.synchronize()
    for sequence, values in zip(batch, losses.double().numpy(), strict=True):  # (T,)
        start = 0
        for window in sequence:
            end = start + window.length
            yield window, values[start + window.seen : end]
            start = end
    on_batch(sum(window.length for sequence in batch for window in sequence))


def _launch(scorer: Scorer, batch: list[list[Window]]) -> Launched:
    """Start a batch on the model's device."""
    # Lay the windows side by side in sequences.
    T = max(sum(window.length for window in sequence) for sequence in batch)
    rows = []
    for sequence in batch:
        lengths = [window.length for window in sequence]
        padding = T - sum(lengths)
        tokens = [*(window.ids[:-1] for window in sequence), np.zeros(padding, np.int64)]
        labels = (np.where(window.is_target, window.ids[1:], IGNORED) for window in sequence)
        targets = [*labels, np.full(padding, IGNORED)]
        beyond = len(sequence) + padding_ids(padding).numpy()
        doc_ids = [np.arange(len(sequence)).repeat(lengths), beyond]
        rows.append([np.concatenate(parts) for parts in (tokens, targets, doc_ids)])
    # A sequence with one window needs no document mask: no token of it sees the padding after it.
    # It needs one if RoPE follows the sequence's length.
    is_alone = all(len(sequence) == 1 for sequence in batch) and not scorer.follows_length
    arrays = np.array(rows, dtype=np.int64).swapaxes(0, 1)  # (3, B, T)
    x, y, documents = map(torch.from_numpy, arrays)
    losses = scorer.ask(Asked(x, y, None if is_alone else documents)).to("cpu", non_blocking=True)
    # Reading them waits for no batch that the GPU was given after this one
    copied = torch.cuda.Event() if scorer.device.type == "cuda" else None
    if copied is not None:
        copied.record()
    return losses, copied
