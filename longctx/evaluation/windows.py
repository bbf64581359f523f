"""Windows: the pieces of documents that a model is shown, and how they lie side by side in rows.

Window k of a document shows the tokens k·stride .. k·stride + context - 1 and scores the next-token
predictions that no window before it has scored, so that a token has context - stride + 1 tokens
before it, or all of the document's. Windows shorter than the context share a row, kept apart by the
attention mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from longctx.data.packing import pack

# Batches, and rows at least, that are packed together, so that few places in a row stay empty.
AHEAD = (4, 32)


class Document(NamedTuple):
    """A document to score: token ids (tokens,), and UTF-8 bytes and words of the text of the tokens
    that are scored: of ids[1:] all, or those in `scored` (tokens,) bool.
    """

    name: str
    ids: np.ndarray
    n_bytes: int
    n_words: int = 0
    scored: np.ndarray | None = None


class Window(NamedTuple):
    """ids (length + 1,), of which the last is only predicted; the first `seen` predictions are not
    scored here.

    `begin` is the place of ids[0] in document number `owner`. `context` is 0, or for a window that
    scores some tokens a second time the context that they are given. `scored` (length + 1,) bool
    says which tokens are scored, if not all are; the losses of the others are 0.
    """

    owner: int
    begin: int
    ids: np.ndarray
    seen: int
    context: int = 0
    scored: np.ndarray | None = None

    @property
    def targets(self) -> int:
        """How many tokens are scored here."""
        if self.scored is None:
            return len(self.ids) - 1 - self.seen
        return int(np.count_nonzero(self.scored[1 + self.seen :]))


def stride_of(stride: int | None, context: int) -> int:
    """The stride, by default half of the context; ValueError where it would leave tokens out."""
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(
            f"stride={stride}: tokens between two windows would never be scored; "
            f"give 1 to seq_len={context}"
        )
    return stride


def spans(tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first): the window shows tokens begin .. end - 1 and scores the tokens first ..
    end.
    """
    begin, first = 0, 1
    while first < tokens:
        end = min(begin + context, tokens - 1)
        yield begin, end, first
        begin, first = begin + stride, end + 1


def sliding(owner: int, document: Document, context: int, stride: int) -> Iterator[Window]:
    """Yield the windows that score every token of a document but the first, each once, or those
    that `document.scored` names.
    """
    for begin, end, first in spans(len(document.ids), context, stride):
        window = window_of(owner, document, begin, end, first - begin - 1)
        if window.targets:
            yield window


def window_of(
    owner: int, document: Document, begin: int, end: int, seen: int, context: int = 0
) -> Window:
    """Return the window that shows the tokens begin .. end - 1 and predicts the last at `end`."""
    scored = None if document.scored is None else document.scored[begin : end + 1]
    return Window(owner, begin, document.ids[begin : end + 1], seen, context, scored)


def batches(windows: Iterable[Window], context: int, rows: int) -> Iterator[list[list[Window]]]:
    """Batches of at most `rows` rows of at most `context` tokens; all windows, read only a little
    ahead.
    """
    together = max(AHEAD[0] * rows, AHEAD[1]) * context
    waiting: list[Window] = []
    tokens = 0
    for window in windows:
        waiting.append(window)
        tokens += len(window.ids) - 1
        if tokens >= together:
            packed = _packed(waiting, context)
            # The other half, of short windows, fills rows to come.
            full = max(len(packed) // 2 // rows * rows, rows)
            for start in range(0, full, rows):
                yield packed[start : start + rows]
            waiting = [window for row in packed[full:] for window in row]
            tokens = sum(len(window.ids) - 1 for window in waiting)
    packed = _packed(waiting, context)
    for start in range(0, len(packed), rows):
        yield packed[start : start + rows]


def _packed(windows: list[Window], context: int) -> list[list[Window]]:
    """Rows of at most `context` tokens, in each the longest window first."""
    windows = sorted(windows, key=lambda window: -len(window.ids))
    packing = pack(np.array([len(window.ids) - 1 for window in windows], np.int64), context)
    return [
        [windows[n] for n in packing.document[first:end].tolist()]
        for first, end in pairwise(packing.row_starts.tolist())
    ]
