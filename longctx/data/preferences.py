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
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Labelled(NamedTuple):
    """A row of data.preferences=labels."""

    name: str
    place: str
    prompt: Any
    answer: Any
    tools: Any
    side: int


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
    answers = ("chosen", "rejected") if config.preferences == "pairs" else ("completion",)
    row = {key: value for key, value in row.items() if value is not None}
    needed = answers if config.preferences == "pairs" else ("prompt", *answers, "label")
    found = ", ".join(list(row)[:8])
    for key in needed:
        refuse((key not in row, f"{place}: no field '{key}' (found {found})"))
    for key in [key for key in ("prompt", *answers) if key in row]:
        what = (
            "a string; conversations need data.chat=true" if kind is str else "a list of messages"
        )
        refuse((not isinstance(row[key], kind), f"{place}: '{key}' must be {what}"))
    refuse((not all(row[key] for key in answers), f"{place}: an answer is empty; leave it out"))
    is_labelled = config.preferences == "pairs" or row["label"] in (True, False)
    refuse((not is_labelled, f"{place}: 'label' must be true or false"))
    whole: Row = json.loads(
        encodable(json.dumps(row, ensure_ascii=False, default=str), place, config)
    )
    return whole


def _pairs(rows: Iterable[tuple[str, str, Row]], write: Write) -> Iterator[Document]:
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
    same = zip(chosen, rejected, strict=False)
    shared = next((n for n, (a, b) in enumerate(same) if a != b), min(len(chosen), len(rejected)))
    # Words carry the space before them, as TRL's extract_prompt does it
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    advice = "give it as 'prompt'"
    refuse((not shared, f"'chosen' and 'rejected' begin with no common prompt; {advice}"))
    is_whole = shared < min(len(chosen), len(rejected))
    refuse(
        (not is_whole, f"one of 'chosen' and 'rejected' is the beginning of the other; {advice}")
    )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _labels(rows: Iterable[tuple[str, str, Row]], write: Write) -> Iterator[Document]:
    """Write each answer beside the one of the row before; the first one's is of the second row."""
    first: Labelled | None = None
    before: Any = None
    for name, place, row in rows:
        side = CHOSEN if row["label"] else REJECTED
        this = Labelled(name, place, row["prompt"], row["completion"], row.get("tools"), side)
        if first is None and before is None:
            first, before = this, this.answer
            continue
        if first is not None:
            yield _labelled(first, this.answer, write)
            first = None
        yield _labelled(this, before, write)
        before = this.answer
    if first is not None:
        raise ValueError(f"{first.place}: the only answer; KTO compares it with another, give more")


def _labelled(row: Labelled, unrelated: Any, write: Write) -> Document:
    with named(row.place):
        own = write(row.name, row.prompt, row.answer, row.tools)
        other = write(row.name, row.prompt, unrelated, row.tools)
    return own._replace(side=row.side, others=(other._replace(side=UNRELATED),))
