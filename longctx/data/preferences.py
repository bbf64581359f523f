"""Answers that are preferred: rows of `data.preferences=pairs|labels` as documents.

The formats are those of TRL, as text or as conversations:

    pairs    {"prompt": …, "chosen": …, "rejected": …}, or without prompt: what both begin with
    labels   {"prompt": …, "completion": …, "label": true or false}

A row is one document of several sides that share a sequence; of each the answer alone is learned. A
pair has the sides CHOSEN and REJECTED. A labelled answer is CHOSEN or REJECTED, and beside it
stands the same prompt with the answer of another row, UNRELATED, by which KTO (arXiv 2402.01306)
measures how far the model has moved from the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice, pairwise, takewhile
from operator import eq
from typing import TYPE_CHECKING, Any

from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.data.answers import CHOSEN, REJECTED, UNRELATED
from longctx.data.sources import Document, encodable
from longctx.untrusted import named

if TYPE_CHECKING:
    from longctx.data.chat import Template

Row = Mapping[str, Any]
# (name, prompt, answer, tools) → the whole, of which the answer is learned
Write = Callable[[str, Any, Any, Any], Document]


def documents(
    rows: Iterable[tuple[str, str, Row]], config: DataConfig, template: Template | None
) -> Iterator[Document]:
    """Read the document of each (name, place for messages, row); raise ValueError, one line, for
    a row of another format.
    """
    kind = str if template is None else list

    def write(name: str, prompt: Any, answer: Any, tools: Any) -> Document:
        if template is not None:
            return template.answered(name, prompt, answer, tools)
        return Document(name, prompt + answer, [(len(prompt), len(prompt) + len(answer))])

    checked = ((name, place, _checked(place, row, config, kind)) for name, place, row in rows)
    yield from (_pairs if config.preferences == "pairs" else _labels)(checked, write)


def _checked(place: str, row: Row, config: DataConfig, kind: type) -> Row:
    """Return the row without what is null, its texts encodable and each of type `kind`."""
    has_pairs = config.preferences == "pairs"
    answers = ("chosen", "rejected") if has_pairs else ("completion",)
    row = {key: value for key, value in row.items() if value is not None}
    found = ", ".join(list(row)[:8])
    for key in answers if has_pairs else ("prompt", *answers, "label"):
        refuse((key not in row, f"{place}: no field '{key}' (found {found})"))
    texts = "a string; conversations need data.chat=true"
    expected = texts if kind is str else "a list of messages"
    for key in ("prompt", *answers):
        is_wrong = key in row and not isinstance(row[key], kind)
        refuse((is_wrong, f"{place}: '{key}' must be {expected}"))
    is_labelled = has_pairs or row["label"] in (True, False)
    refuse(
        (not all(row[key] for key in answers), f"{place}: an answer is empty; leave it out"),
        (not is_labelled, f"{place}: 'label' must be true or false"),
    )
    text = json.dumps(row, ensure_ascii=False, default=str)
    whole: Row = json.loads(encodable(text, place, config))
    return whole


def _pairs(rows: Iterator[tuple[str, str, Row]], write: Write) -> Iterator[Document]:
    for name, place, row in rows:
        with named(place):
            prompt, chosen, rejected = _with_prompt(row)
            refuse((chosen == rejected, "'chosen' and 'rejected' are equal; leave the row out"))
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


def _labels(rows: Iterator[tuple[str, str, Row]], write: Write) -> Iterator[Document]:
    """Write each answer beside the one of the row before; the first one's is of the second row."""
    first = list(islice(rows, 2))
    if len(first) == 1:
        _, place, _ = first[0]
        raise ValueError(f"{place}: the only answer; KTO compares it with another, give more")
    for (*_, before), (name, place, row) in pairwise(chain(first[1:], first, rows)):
        with named(place):
            own = write(name, row["prompt"], row["completion"], row.get("tools"))
            other = write(name, row["prompt"], before["completion"], row.get("tools"))
        side = CHOSEN if row["label"] else REJECTED
        yield own._replace(side=side, others=(other._replace(side=UNRELATED),))
