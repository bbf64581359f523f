"""Answers that are compared, as tokens: the sides of a document, and what fits a sequence.

A document holds one side after another: prompt and answer, the same prompt and another answer. All
sides stay in one sequence. If they are too long for it, the beginnings of the prompts are left out,
the same number of tokens of each; begin-of-text and the last token of a prompt stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from longctx.data.store import Store

CHOSEN, REJECTED, UNRELATED = range(3)
SIDES = 3  # how many there are at most


def sides_of(store: Store, document: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the marks (tokens,), where each side begins, and its tokens before the answer."""
    marks = store.marks(document)
    assert marks is not None
    side, scored = marks >> 1, marks & 1
    begins = np.flatnonzero(np.diff(side, prepend=-1))
    sides = np.split(scored, begins[1:])
    return marks, begins, np.array([int(np.argmax(of_side)) for of_side in sides])


def first_side(store: Store, document: int) -> int:
    """Return the tokens of the first side."""
    return int(sides_of(store, document)[1][1])


def fitted(store: Store, documents: np.ndarray, seq_len: int, bos_id: int | None) -> np.ndarray:
    """Return the tokens of each of `documents` in a sequence of `seq_len`, prompts cut as needed.

    Raises ValueError if the answers alone are too long.
    """
    shown = store.lengths[documents]
    for number in np.flatnonzero(shown > seq_len).tolist():
        document = int(documents[number])
        _, begins, prompts = sides_of(store, document)
        # The last token of a prompt predicts the first of its answer, and a model has seen no text
        # without its begin-of-text: both stay.
        stays = 1 + (store.tokens(document)[begins] == bos_id)
        limit = int((prompts - stays).min())
        cut = -(-(int(shown[number]) - seq_len) // len(begins))
        if cut > limit:
            needed = int(shown[number]) - max(0, limit) * len(begins)
            raise ValueError(
                f"{store.name(document)}: its answers, with the last token of each prompt, take "
                f"{needed:,} tokens of one sequence; give seq_len={needed} or more, or leave it out"
            )
        shown[number] -= cut * len(begins)
    return shown


def shortened(
    store: Store, document: int, length: int, bos_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and marks of a document, (length,) each, its prompts cut as `fitted` says."""
    ids, marks = store.tokens(document), store.marks(document)
    assert marks is not None
    if length == len(ids):
        return ids, marks
    _, begins, _ = sides_of(store, document)
    cut = (len(ids) - length) // len(begins)
    stays = np.ones(len(ids), bool)
    for begin in begins.tolist():
        first = begin + int(ids[begin] == bos_id)
        stays[first : first + cut] = False
    return ids[stays], marks[stays]
