"""What an evaluation measured: its JSON, its picture, and a copy at wandb."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import WandbConfig
from longctx.evaluation.perplexity import Perplexity, Score
from longctx.evaluation.setup import Setup
from longctx.evaluation.subject import Subject
from longctx.runs import evaluations
from longctx.runs.tracking import log_evaluation, wandb_mode

Decode = Callable[[Sequence[int]], str]
# Keys that say where an evaluation runs and how fast, not what it measures.
PLACE = (
    "checkpoint",
    "device",
    "devices",
    "strategy",
    "context",
    "batch_size",
    "compile",
    "wandb",
)


class Result(NamedTuple):
    """One measurement. `show` prints the tables of `content`, `draw` writes its picture."""

    stem: str  # of the names of its files in eval/
    content: dict[str, Any]  # of the JSON
    show: Callable[[dict[str, Any]], None]
    draw: Callable[[dict[str, Any], Path], None] | None = None


def save(result: Result, setup: Setup) -> Path:
    """Write the JSON and the picture, send both to wandb if asked for, and return the JSON's path.

    The file of an earlier evaluation with the same keys is replaced; one with others stays.
    """
    path = evaluations.place(setup.results, result.stem, result.content["asked"])
    evaluations.write(result.content, path)
    picture = None
    if result.draw is not None:
        picture = path.with_suffix(".png")
        result.draw(result.content, picture)
    send(result.content, picture, setup.config.wandb, setup.subject)
    return path


def send(content: dict[str, Any], picture: Path | None, mode: str, subject: Subject) -> None:
    """Send a result to the wandb project and group of the run, unless `mode`, or WANDB_MODE where
    that is auto, is disabled.

    A failure is a line on stderr and ends nothing: the files are written.
    """
    if wandb_mode(WandbConfig(mode=mode)) == "disabled":
        return
    saved = (subject.run or {}).get("wandb", {})
    settings = {key: value for key, value in saved.items() if key in vars(WandbConfig())}
    try:
        config = replace(WandbConfig(**settings), mode=mode)
        log_evaluation(config, subject.home, content, picture)
    except Exception as error:  # wandb's own errors, the network's, the disk's
        print(f"wandb is off: {' '.join(str(error).split())}", file=sys.stderr)


def decisive(config: EvalConfig) -> dict[str, Any]:
    """The keys that decide what is measured."""
    return {key: value for key, value in asdict(config).items() if key not in PLACE}


def perplexity_content(result: Perplexity, decode: Decode) -> dict[str, Any]:
    """What the JSON says of a perplexity: totals, every document, position, context and gain."""
    return {
        "context": result.context,
        "stride": result.stride,
        "windows": result.windows,
        "total": _plain(result.total) | {"standard_error": result.standard_error},
        "by_position": result.positions.buckets(),
        "by_context": result.contexts.rows(),
        "gains": gain_rows(result, decode),
        "documents": [_plain(score) for score in result.documents],
    }


def gain_rows(result: Perplexity, decode: Decode) -> list[dict[str, Any]]:
    """The tokens that gain most from a long context, with the text before and after them."""
    return [
        {
            "document": result.documents[gain.owner].name,
            "position": gain.position,
            "short": gain.short,
            "long": gain.long,
            "gain": gain.nats,
            "before": decode(gain.ids[: gain.at]),
            "token": decode(gain.ids[gain.at : gain.at + 1]),
            "after": decode(gain.ids[gain.at + 1 :]),
        }
        for gain in result.contexts.gains
    ]


def _plain(score: Score) -> dict[str, Any]:
    """A score in JSON, null for what is not a finite number."""
    numbers = {
        "nats": score.nats,
        "perplexity": score.perplexity,
        "word_perplexity": score.word_perplexity,
        "bits_per_byte": score.bits_per_byte,
    }
    return {
        "name": score.name,
        "tokens": score.tokens,
        "bytes": score.n_bytes,
        "words": score.n_words,
        **{name: x if math.isfinite(x) else None for name, x in numbers.items()},
    }
