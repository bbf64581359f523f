"""The files that eval.py leaves in a run's eval/: their names and their content. Torch-free.

Evaluation writes them and the report reads them. A perplexity has "total", pass keys have "kinds",
RULER has "ruler", tasks of lm-evaluation-harness have "results".
"""

from __future__ import annotations

import itertools
import json
import math
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from longctx import files, untrusted
from longctx.config.fields import refuse
from longctx.runs.metrics_file import without_infinite

FOLDER = "eval"  # next to the checkpoints of a run, or in a Hugging Face folder
SIZE = 1 << 30  # bytes of the largest file: RULER's holds every answer
LONGEST_PART = 80  # characters of a setting in a file's name
Content = dict[str, Any]  # of one JSON


def stem(*parts: object) -> str:
    """Name the files of an evaluation by its decisive settings, such as
    val-step-00000900-16384-8192-flash.
    """
    return "-".join(str(part)[:LONGEST_PART] for part in parts)


def path_for(folder: Path, stem: str, keys: Content) -> Path:
    """Return the JSON in `folder` for the answer to `keys`, which decide the measurement."""
    # The file of that stem, or a numbered one if another request has taken the name
    keys = json.loads(json.dumps(keys))
    path, numbers = folder / f"{stem}.json", itertools.count(2)
    while path.exists():
        with suppress(OSError, ValueError, AttributeError):  # not a file of ours: it stays
            if untrusted.read_json(path, SIZE, folder).get("asked") == keys:
                break
        path = folder / f"{stem}-{next(numbers)}.json"
    return path


def write(content: Content, path: Path) -> None:
    """Write `content` to `path`, atomically; null stands for a number that is not finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(without_infinite(content), indent=1, allow_nan=False)
    files.write_text(path, text + "\n")


class Evaluations(NamedTuple):
    """The content of each JSON in a run's eval/, with its name as "file"."""

    perplexities: list[Content]
    passkeys: list[Content]
    rulers: list[Content]
    tasks: list[Content]


def read_evaluations(folder: Path) -> Evaluations:
    """Read every evaluation in the folder of a run; ValueError names the file that is none."""
    found: dict[str, list[Content]] = {"total": [], "kinds": [], "ruler": [], "results": []}
    for path in sorted((folder / FOLDER).glob("*.json")):
        with untrusted.opened(path):
            parse = dict.fromkeys(("parse_float", "parse_constant"), finite)
            content = untrusted.read_json(path, SIZE, folder, **parse)
            kinds = [key for key in found if key in content]
            refuse((not kinds, f"{path}: not an evaluation; take it out"))
            found[kinds[-1]].append(content | {"file": path.name})
    return Evaluations(*found.values())


def finite(text: str) -> float:
    """Return the number in `text`; raises ValueError unless it is finite."""
    value = float(text)
    refuse((not math.isfinite(value), f"{text}: not a finite number"))
    return value


def scores(content: Content) -> dict[str, float]:
    """Return the numbers of an evaluation: perplexities, shares of pass keys found, RULER's and
    tasks' scores.
    """
    numbers: Content = dict(content.get("total", {}))
    for kind, grid in content.get("kinds", {}).items():
        for length, shares in zip(grid["lengths"], grid["accuracy"], strict=True):
            numbers[f"{kind}/{length}"] = fmean(shares)
    lengths, by_task = ruler_rows(content) if "ruler" in content else ([], {})
    for task, shares in by_task.items():
        for length, share in zip(lengths, shares, strict=True):
            numbers[f"ruler/{task}/{length}"] = share
    for score in task_scores(content.get("results", {})):
        numbers[f"{score['task']}/{score['metric']}"] = score["value"]
    return {key: x for key, x in numbers.items() if isinstance(x, int | float)}


def ruler_rows(content: Content) -> tuple[list[int], dict[str, list[float]]]:
    """Return the lengths, and the scores 0 to 1 at each of them, of every task and in the mean."""
    lengths = list(map(int, content["ruler"]["lengths"]))
    rows = {task: list(map(float, x)) for task, x in content["ruler"]["scores"].items()}
    if len(rows) > 1:
        rows["mean"] = [fmean(scores) for scores in zip(*rows.values(), strict=True)]
    return lengths, rows


def task_scores(results: dict[str, Any]) -> list[Content]:
    """Return the scores in `results` of lm-evaluation-harness, in their order: task, metric (with
    its filter, if there is one), value and standard error.
    """
    # Keys are "metric,filter" with a number, "metric_stderr,filter" with the standard error,
    # and others without a comma that are no scores
    scores = []
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            if metric.isdigit() and value == -1:  # a length that RULER did not run
                continue
            error = values.get(f"{metric}_stderr,{filter_name}")
            error = float(error) if isinstance(error, int | float) else None
            name = metric if filter_name in ("", "none") else f"{metric} ({filter_name})"
            scores.append({"task": task, "metric": name, "value": float(value), "error": error})
    return scores
