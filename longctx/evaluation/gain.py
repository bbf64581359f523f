"""What a long context is worth to each document: longctx score MODEL out=FILE.jsonl.

Every document is scored by sliding windows of the context and of a shorter one. Its gain is the
nats for each target token that the longer one saves. LongFilter (arXiv 2510.25804) trains on
documents that gain most: `data.filter=FILE.jsonl`, which finds a document by the hash of its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

from longctx import files
from longctx.config.fields import refuse
from longctx.data.dataset import EncodedDocument
from longctx.evaluation.perplexity import Perplexity
from longctx.untrusted import named

SHOWN = 5  # documents with the largest gains, and with the smallest
NAME = 40  # last characters of a document's name in the picture
Row = dict[str, Any]
Documents = Iterable[EncodedDocument]


def longer_documents(documents: Documents, context: int, short: int) -> Documents:
    """Return the documents of more than `short` tokens; ValueError if none could gain."""
    problem = f"short={short}: not below seq_len={context}, so nothing gains; give fewer tokens"
    refuse((short >= context, problem))
    found = (document for document in documents if len(document.ids) > short)
    first = list(islice(found, 1))
    refuse((not first, f"short={short}: no document has more tokens, so none gains; give fewer"))
    return chain(first, found)


def write_gains(path: Path, long: Perplexity, near: Perplexity) -> dict[str, list[Row]]:
    """Write a line for each document of `long`, and a picture; return the best and worst, and the
    gain by position. A document that is not in `near` gains 0.
    """
    # Found by the hash of the text, since `near` lacks some documents
    nats = {score.key: score.nats for score in near.documents}
    rows: list[Row] = [
        {
            "name": score.name,
            "key": score.key.hex(),
            "tokens": score.tokens,
            "loss": score.nats / score.tokens,
            "gain": (nats.get(score.key, score.nats) - score.nats) / score.tokens,
        }
        for score in long.documents
        if score.tokens
    ]
    lines = (json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with named(path, "a loss is no finite number, so nothing is written; are the model's weights?"):
        files.write_text(path, "".join(lines))
    rows = [{key: row[key] for key in ("name", "tokens", "loss", "gain")} for row in rows]
    rows.sort(key=lambda row: -row["gain"])
    shown = rows if len(rows) <= 2 * SHOWN else rows[:SHOWN] + rows[-SHOWN:]
    positions = by_position(long, near)
    title = f"gain by {long.context:,} tokens of context over {near.context:,}"
    draw(path.with_suffix(".png"), title, positions, shown)
    return {"gains": shown, "gain_by_position": positions}


def by_position(long: Perplexity, near: Perplexity) -> list[Row]:
    """Return a row for each power of two of tokens before the targets, from the short context on:
    the documents that it holds have no such targets.
    """
    return [
        {"tokens before": f"{1 << n:,}", "tokens": int(tokens), "gain": (nats - saved) / tokens}
        for n, (tokens, nats, saved) in enumerate(zip(*near.sums, long.sums[1], strict=True))
        if n >= (near.context - 1).bit_length() and tokens
    ]


def draw(path: Path, title: str, by_position: list[Row], documents: list[Row]) -> None:
    """Draw the gain by position, and the gains of the best and worst `documents` by their names."""
    from matplotlib.figure import Figure  # takes a second, which no other evaluation needs

    figure = Figure(figsize=(14, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([row["gain"] for row in by_position], "o-", color="tab:green")
    left.set_xticks(range(len(by_position)), [x["tokens before"] for x in by_position], fontsize=8)
    left.set(xlabel="tokens before a target, from", ylabel="nats per token", title=title)
    left.grid(alpha=0.3)
    gains = [row["gain"] for row in documents]
    colors = ["tab:green" if gain > 0 else "tab:red" for gain in gains]
    right.barh(range(len(gains)), gains, color=colors)
    # A file's name is no formula, whatever it has between dollars
    names = [files.printable(row["name"])[-NAME:] for row in documents]
    right.set_yticks(range(len(names)), names, parse_math=False, fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="nats per token", title="documents that gain most and least")
    with files.atomic(path) as partial:
        figure.savefig(partial, dpi=120)
