"""Evaluations: the JSON files that eval.py leaves in a run's folder, whichever version wrote them.

Torch-free. A file that is none of ours, or was cut, is reported and left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from longctx.files import printable
from longctx.runs.metrics import Row

Line = dict[str, list[float]]  # points to draw: "x", such as tokens before, and "y", the losses
SCORES = ("perplexity", "word_perplexity", "bits_per_byte")


class Evaluations(NamedTuple):
    """What eval.py left in a folder: perplexities, maps of facts found again, scores of tasks; and
    the files that are none of these.
    """

    perplexities: list[Row]
    passkeys: list[Row]
    tasks: list[Row]
    unreadable: list[Path]


def read_evaluations(folder: Path) -> Evaluations:
    """Every evaluation in the folder of a run."""
    result = Evaluations([], [], [], [])
    old = folder / "passkey.json"  # where early versions left it
    for path in (*sorted((folder / "eval").glob("*.json")), *([old] if old.is_file() else [])):
        try:
            content = json.loads(
                path.read_text(encoding="utf-8"), parse_float=number, parse_constant=number
            )
            if "kinds" in content or "accuracy" in content:
                result.passkeys.extend(passkeys(content, path.name))
            elif "results" in content:
                result.tasks.extend(tasks(content))
            else:
                result.perplexities.append(perplexity(content, path.name))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            result.unreadable.append(path)
    return result


def perplexity(content: Row, name: str) -> Row:
    """A perplexity, without those of its single documents."""
    total = content["total"]
    return {
        "file": printable(name),
        "context": int(content["context"]),
        "stride": int(content["stride"]),
        "tokens": int(total["tokens"]),
        **{key: None if total.get(key) is None else float(total[key]) for key in SCORES},
        "positions": line(content.get("by_position", []), "first"),
        "contexts": line(content.get("by_context", []), "context"),
    }


def line(rows: Iterable[Row], x: str) -> Line:
    """The losses of an evaluation over the key `x`."""
    rows = list(rows)
    return {
        "x": [int(row[x]) for row in rows],
        "y": [float(f"{float(row['loss']):.5g}") for row in rows],
    }


def passkeys(content: Row, name: str) -> list[Row]:
    """The maps of one file, one for each kind of fact; `accuracy` is [length][depth]."""
    grids = content.get("kinds", {"passkey": content})
    maps = []
    for kind, grid in grids.items():
        lengths = [int(x) for x in grid["lengths"]]
        depths = [float(x) for x in grid["depths"]]
        accuracy = [[float(x) for x in row] for row in grid["accuracy"]]
        if len(accuracy) != len(lengths) or any(len(row) != len(depths) for row in accuracy):
            raise ValueError(f"{name}: accuracy is not [length][depth]")
        maps.append(
            {
                "file": printable(name),
                "kind": printable(kind),
                "lengths": lengths,
                "depths": depths,
                "accuracy": accuracy,
            }
        )
    return maps


def tasks(content: Row) -> list[Row]:
    """The scores of lm-evaluation-harness, one for each task and metric."""
    scores = []
    for task, results in content["results"].items():
        for key, value in results.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            if metric.isdigit() and value == -1:  # RULER's mark for a length that did not run
                continue
            name = f"{task} {metric}" if filtered == "none" else f"{task} {metric} ({filtered})"
            scores.append(
                {"name": printable(name), "value": float(value), "context": int(content["context"])}
            )
    return scores


def number(text: str) -> float:
    """A number of a JSON; ValueError for what a page cannot hold: NaN, infinity and what is beyond
    a float.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value
