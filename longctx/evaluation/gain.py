"""What a long context is worth to each document: eval.py score=FILE.jsonl.

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
from longctx.evaluation.perplexity import Perplexity, perplexity
from longctx.evaluation.score import OnBatch, Scorer

SHOWN = 5  # documents with the largest gains, and with the smallest
BAR = 40  # characters for the largest gain


def write_gains(
    path: Path,
    scorer: Scorer,
    documents: Iterable[EncodedDocument],
    long: Perplexity,
    short: int,
    tokens: int,
    on_batch: OnBatch = lambda tokens: None,
) -> list[dict[str, Any]]:
    """Score `documents`, which `long` has scored, with `short` tokens of context; write a line for
    each, and return the best and worst. A forward takes `tokens` on each data rank.

    A document that `short` tokens hold gains 0. Raises ValueError if they hold all.
    """
    longer = (document for document in documents if len(document.ids) > short + 1)
    first = list(islice(longer, 1))
    problem = f"score={path}: no document has more than {short:,} tokens, so none gains by more"
    equal = f"score={path}: contexts= has no length below seq_len={long.context}, to compare with"
    refuse(
        (not first, f"{problem}; give longer ones, or shorter contexts=[N]"),
        (short >= long.context, equal),
    )
    texts, sequences = chain(first, longer), max(1, tokens // short)
    near = perplexity(scorer, texts, short, batch_size=sequences, on_batch=on_batch)
    nats = {score.key: score.nats for score in near.documents}
    rows = [
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
    files.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return best_and_worst(rows)


def best_and_worst(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the largest and smallest gains, each with a bar."""
    rows = sorted(rows, key=lambda row: -row["gain"])
    shown = rows if len(rows) <= 2 * SHOWN else rows[:SHOWN] + rows[-SHOWN:]
    largest = max(rows[0]["gain"], 1e-9)
    return [
        {key: row[key] for key in ("name", "tokens", "loss", "gain")}
        | {"": "█" * max(0, round(BAR * row["gain"] / largest))}
        for row in shown
    ]
