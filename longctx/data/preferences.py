"""Answers that are preferred: rows of `data.preferences=pairs|labels` as documents.

The formats are those of TRL, as text or as conversations:

    pairs    {"prompt": …, "chosen": …, "rejected": …}, or without prompt: what both begin with
    labels   {"prompt": …, "completion": …, "label": true or false}

A row is one document of several sides that share a sequence; of each the answer alone is learned. A
pair has the sides CHOSEN and REJECTED. A labelled answer is CHOSEN or REJECTED, and beside it
stands the same prompt with the answer of another row, UNRELATED, by which KTO (arXiv 2402.01306)
measures how far the model has moved from the reference. A document holds one side after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise, takewhile
from operator import eq
from typing import TYPE_CHECKING, Any

import numpy as np

from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.data.documents import Document, NamedRows
from longctx.data.messages import Row
from longctx.untrusted import named

if TYPE_CHECKING:
    from longctx.data.chat import Template
    from longctx.data.store import Store

CHOSEN, REJECTED, UNRELATED = range(3)
SIDES = 3  # how many there are at most

# (name, prompt, answer, tools) → the whole, of which the answer is learned
Write = Callable[[str, Any, Any, Any], Document]


def documents(rows: NamedRows, config: DataConfig, template: Template | None) -> Iterator[Document]:
    """Read the document of each (name, location for messages, row); raise ValueError, one line, for
    a row of another format.
    """
    kind = str if template is None else list

    def write(name: str, prompt: Any, answer: Any, tools: Any) -> Document:
        if template is not None:
            return template.answered(name, prompt, answer, tools)
        return Document(name, prompt + answer, [(len(prompt), len(prompt) + len(answer))])

    checked = (
        (name, location, _checked(location, row, config, kind)) for name, location, row in rows
    )
    yield from (_pairs if config.preferences == "pairs" else _labels)(checked, write)


def _checked(location: str, row: Row, config: DataConfig, kind: type) -> Row:
    """Return the row without what is null, its texts encodable and each of type `kind`."""
    has_pairs = config.preferences == "pairs"
    answers = ("chosen", "rejected") if has_pairs else ("completion",)
    row = {key: value for key, value in row.items() if value is not None}
    # UltraFeedback has the prompt as a text too, beside conversations that begin with it
    if has_pairs and kind is list and isinstance(row.get("prompt"), str):
        row.pop("prompt")
    found = ", ".join(list(row)[:8])
    for key in answers if has_pairs else ("prompt", *answers, "label"):
        refuse((key not in row, f"{location}: no field '{key}' (found {found})"))
    expected = "a list of messages" if kind is list else "a text; data.chat=true reads messages"
    for key in ("prompt", *answers):
        is_wrong = key in row and not isinstance(row[key], kind)
        refuse((is_wrong, f"{location}: '{key}' must be {expected}"))
    for key in ("system", "chat_template_kwargs"):
        refuse((bool(row.get(key)), f"{location}: '{key}' is not read; put it into 'prompt'"))
    refuse(
        (not all(row[key] for key in answers), f"{location}: an answer is empty; leave it out"),
        (row.get("label", True) not in (True, False), f"{location}: 'label' must be true or false"),
    )
    return row


def _pairs(rows: NamedRows, write: Write) -> Iterator[Document]:
    for name, location, row in rows:
        # Published sets have such rows, which teach nothing: they are left out and counted
        if row["chosen"] == row["rejected"]:
            yield Document(name, "")
            continue
        with named(location):
            prompt, chosen, rejected = _with_prompt(row)
            first = write(name, prompt, chosen, row.get("tools"))
            second = write(name, prompt, rejected, row.get("tools"))
        yield first._replace(others=(second._replace(side=REJECTED),))


def _with_prompt(row: Row) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected; both begin with the prompt if it is not given."""
    chosen, rejected = row["chosen"], row["rejected"]
    if "prompt" in row:
        return row["prompt"], chosen, rejected
    shared = sum(takewhile(bool, map(eq, chosen, rejected)))
    # Words carry the space before them, as TRL's extract_prompt does it
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    advice = "give it as 'prompt'"
    refuse((not shared, f"'chosen' and 'rejected' begin with no common prompt; {advice}"))
    is_beginning = shared == min(len(chosen), len(rejected))
    problem = "one of 'chosen' and 'rejected' is the beginning of the other"
    refuse((is_beginning, f"{problem}; {advice}"))
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _labels(rows: NamedRows, write: Write) -> Iterator[Document]:
    """Write each answer beside the one of the row before; the first one's is of the second row."""
    first = list(islice(rows, 2))
    if len(first) == 1:
        problem = "the only answer; KTO compares it with another, give more"
        raise ValueError(f"{first[0][1]}: {problem}")
    for (*_, before), (name, location, row) in pairwise(chain(first[1:], first, rows)):
        with named(location):
            own = write(name, row["prompt"], row["completion"], row.get("tools"))
            other = write(name, row["prompt"], before["completion"], row.get("tools"))
        side = CHOSEN if row["label"] else REJECTED
        yield own._replace(side=side, others=(other._replace(side=UNRELATED),))


def sides_of(store: Store, document: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the marks (tokens,), where each side begins, and its tokens before the answer."""
    marks = store.marks(document)
    assert marks is not None
    side, scored = marks >> 1, marks & 1
    begins = np.flatnonzero(np.diff(side, prepend=-1))
    sides = np.split(scored, begins[1:])
    return marks, begins, np.array([int(np.argmax(of_side)) for of_side in sides])


def fitted(store: Store, documents: np.ndarray, seq_len: int, bos_id: int | None) -> np.ndarray:
    """Return the tokens of each of `documents` in a sequence of `seq_len`. If it has more, the
    beginnings of all its prompts lose the same number of tokens.

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
