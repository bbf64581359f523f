"""What a long context is worth to each document: eval.py score=FILE.jsonl.

Every document is scored by sliding windows of the context and of a shorter one. Its gain is the
nats for each target token that the longer one saves. LongFilter (arXiv 2510.25804) trains on
documents that gain most: `data.filter=FILE.jsonl`, which finds a document by the hash of its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longctx import files
from longctx.config.fields import refuse
from longctx.data.dataset import EncodedDocument
from longctx.evaluation.perplexity import Perplexity, perplexity
from longctx.evaluation.score import OnBatch, Scorer

SHOWN = 5  # documents with the largest gains, and with the smallest
BAR = 40  # characters for the largest gain


def check_gains(path: Path, documents: Iterable[EncodedDocument], context: int, short: int) -> None:
    """Raise ValueError if none of `documents` can gain, which is told before an hour of scoring."""
    equal = f"score={path}: contexts= has no length below seq_len={context}, to compare with"
    refuse((short >= context, equal))
    problem = f"score={path}: no document has more than {short:,} tokens, so none gains by more"
    holds_all = all(len(document.ids) <= short for document in documents)
    refuse((holds_all, f"{problem}; give longer ones, or shorter contexts=[N]"))


def write_gains(
    path: Path,
    scorer: Scorer,
    documents: Iterable[EncodedDocument],
    long: Perplexity,
    short: int,
    tokens: int,
    on_batch: OnBatch = lambda tokens: None,
) -> dict[str, list[dict[str, Any]]]:
    """Score `documents`, which `long` has scored, with `short` tokens of context; write a line for
    each, and return the best and worst and the gain by position. A forward takes `tokens` on each
    data rank.

    A document that `short` tokens hold gains 0; see `check_gains`.
    """
    longer = (document for document in documents if len(document.ids) > short)
    sequences = max(1, tokens // short)
    near = perplexity(scorer, longer, short, batch_size=sequences, on_batch=on_batch)
    rows = gains_of(long, near)
    files.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    rows = [{key: row[key] for key in ("name", "tokens", "loss", "gain")} for row in rows]
    rows.sort(key=lambda row: -row["gain"])
    shown = rows if len(rows) <= 2 * SHOWN else rows[:SHOWN] + rows[-SHOWN:]
    return {"gains": with_bars(shown), "gain_by_position": with_bars(by_position(long, near))}


def gains_of(long: Perplexity, near: Perplexity) -> list[dict[str, Any]]:
    """Return the line of each document, by the score of the same text in `near`."""
    nats = {score.key: score.nats for score in near.documents}
    return [
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


def by_position(long: Perplexity, near: Perplexity) -> list[dict[str, Any]]:
    """Return a row for each power of two of tokens before the targets, from the short context on:
    the documents that it holds have no such targets.
    """
    first = (near.context - 1).bit_length()
    return [
        {
            "tokens before": f"{1 << bucket:,}",
            "tokens": int(tokens),
            "gain": (nats - saved) / tokens,
        }
        for bucket, (tokens, nats, saved) in enumerate(zip(*near.sums, long.sums[1], strict=True))
        if bucket >= first and tokens
    ]


def with_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, each with a bar as long as its gain."""
    largest = max([1e-9, *(row["gain"] for row in rows)])
    return [row | {"": "█" * max(0, round(BAR * row["gain"] / largest))} for row in rows]
