"""A run as its folder shows it: config.yaml, metrics.jsonl, what `findings` reads, and whether some
process trains it now.

The files may be those of a run that still goes on or was killed, so each may end in the middle of a
line.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from longctx.report.findings import Line, Row, evaluations, kernel_lock, printable

# A curve: "t" tokens seen, "s" seconds of training, "y" values; where rows were joined, also "lo"
# and "hi" beside the mean "y".
Curve = dict[str, list[float]]

CURVES = {
    "loss": "loss",
    "val_perplexity": "validation perplexity",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
    "memory": "peak memory (GiB)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
}


POSITIONS = "val_loss_by_position/"
FACTS = "facts_found/"
PARTS = (
    "forward_ms",
    "backward_ms",
    "optimizer_ms",
    "data_wait_ms",
)  # of a step; what is left of it is the rest

TIMES = ("ms_per_step", *PARTS)


class NotARun(ValueError):
    """There is a folder, but nothing in it to report on."""


@dataclass
class Run:
    """`figures` has no key for what the run's rows do not say; `notes` are what a reader should
    know about the files.
    """

    folder: Path
    label: str
    config: dict[str, Any]
    figures: Row
    curves: dict[str, Curve]
    evaluations: list[Row]
    ended: str
    notes: list[str] = field(default_factory=list)
    passkeys: list[Row] = field(default_factory=list)
    tasks: list[Row] = field(default_factory=list)
    lock: dict[str, str] = field(default_factory=dict)
    positions: Line = field(default_factory=dict)  # loss over tokens before, of the last validation
    facts: dict[str, dict[int, float]] = field(
        default_factory=dict
    )  # kind → length → share found, of the last validation

    @property
    def longest(self) -> int | None:
        """The longest context that the run trained or was evaluated at."""
        lengths = [self.config.get("seq_len"), *(found["context"] for found in self.evaluations)]
        return max((length for length in lengths if isinstance(length, int)), default=None)


def read(folder: Path, most: int) -> Run:
    """The run in `folder`, its curves reduced to `most` points; NotARun or FileNotFoundError, one
    line, if there is none.
    """
    config = read_config(folder)
    training = is_training(folder)
    rows, skipped = read_rows(folder)
    if not rows:
        raise NotARun(
            f"{folder}: no metrics yet; wait for the first row of metrics.jsonl, or start the run again"
        )
    run = Run(
        folder, printable(folder.resolve().name), config, figures(rows), curves(rows, most), [], ""
    )
    run.ended = ending(run.figures.get("step", 0), config.get("max_steps"), training)
    if skipped:
        run.notes.append(
            f"{printable(str(folder))}: left out as incomplete: {skipped} of metrics.jsonl"
        )
    run.evaluations, run.passkeys, run.tasks, wrong = evaluations(folder)
    run.notes += [f"{printable(str(path))}: not an evaluation's JSON, left out" for path in wrong]
    try:
        run.lock = kernel_lock(folder)
    except (OSError, ValueError):
        run.notes.append(f"{printable(str(folder))}: kernel.lock.json cannot be read, left out")
    run.positions = positions(rows)
    run.facts = facts(rows)
    return run


def read_config(folder: Path) -> dict[str, Any]:
    """config.yaml with nested keys joined by dots; raises what `read` raises."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: no such folder; give the folders of runs, such as runs/*"
        )
    path = folder / "config.yaml"
    if not path.is_file():
        inside = any(folder.glob("*/config.yaml"))
        hint = (
            f"it holds runs, so give {folder}/*"
            if inside
            else "it has no config.yaml; give runs/NAME"
        )
        raise NotARun(f"{folder}: not the folder of a run, {hint}")
    try:
        loaded = yaml.load(
            path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NotARun(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise NotARun(f"{path}: not the configuration of a run; it should hold key: value lines")
    return flat(loaded)


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"layers": 2}} as {"model.layers": 2}."""
    result: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def read_rows(folder: Path) -> tuple[list[Row], str]:
    """The rows of metrics.jsonl, and which of its lines were cut off or are no rows ("" if none)."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return [], ""
    lines = [line for line in path.read_bytes().decode("utf-8", "replace").split("\n") if line]
    try:  # all at once, which is twice as fast as one by one
        values = json.loads(f"[{','.join(lines)}]")
    except json.JSONDecodeError:
        values = [parsed(line) for line in lines]
    wrong = [number for number, value in enumerate(values) if not is_row(value)]
    rows = [value for value in values if is_row(value)] if wrong else values
    if wrong == [len(values) - 1]:
        return rows, "the last line"
    return rows, f"{len(wrong)} of {len(values):,} lines" if wrong else ""


def parsed(line: str) -> Row | None:
    """A line of metrics.jsonl; None if it is none."""
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    return value if is_row(value) else None


def is_row(value: Any) -> bool:
    """Whether a value is a row as `train.py` logs them."""
    return (
        isinstance(value, dict)
        and type(value.get("step")) is int
        and type(value.get("tokens_seen")) is int
    )


def is_training(folder: Path) -> bool:
    """Whether a process trains the run now: it holds a lock on the folder; FileNotFoundError, one
    line, where it is gone.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder}: the folder is gone; it was deleted or moved") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def ending(step: int, steps: Any, training: bool) -> str:
    """How far a run came and whether it goes on."""
    if training:
        return f"training, step {step:,} of {steps:,}" if isinstance(steps, int) else "training"
    if isinstance(steps, int) and step >= steps:
        return "finished"
    return f"stopped at step {step:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")


def memory(row: Row) -> float | None:
    """Peak memory in GiB: the GPU's, else the process's."""
    found: float | None = (
        row["memory_peak_gib"] if "memory_peak_gib" in row else row.get("process_peak_gib")
    )
    return found


def figures(rows: list[Row]) -> Row:
    """What the rows come to: the last loss, median speed (the first step warms up), largest memory."""
    steps = [row for row in rows if "loss" in row]
    result: Row = {}
    if steps:
        last, settled = steps[-1], steps[1:] or steps
        result |= {key: last[key] for key in ("step", "tokens_seen", "seconds") if key in last}
        result["loss"] = (
            math.nan if last["loss"] is None else last["loss"]
        )  # null is what was no number
        some = settled[:: max(1, len(settled) // 1000)]
        for key in ("tokens_per_second", "mfu", *TIMES):
            if found := finite(row.get(key) for row in (some if key in TIMES else settled)):
                result[key] = median(found)
        for key in ("memory_peak_gib", "process_peak_gib", "memory_predicted_gib"):
            if found := finite(row[key] for row in steps if key in row):
                result[key] = max(found)
    if found := finite(row.get("val_perplexity") for row in rows):
        result["val_perplexity"] = found[-1]
    return result


def positions(rows: list[Row]) -> Line:
    """Loss over the number of tokens before, of the last validation that tells it."""
    for row in validations_last_first(rows):
        found = {
            int(key.removeprefix(POSITIONS)): row[key] for key in row if key.startswith(POSITIONS)
        }
        if found and all_finite(list(found.values())):
            return {"x": list(found), "y": short(found.values())}
    return {}


def validations_last_first(rows: list[Row]) -> Iterator[Row]:
    """The rows of validations, the newest first."""
    return (row for row in reversed(rows) if "val_perplexity" in row)


def facts(rows: list[Row]) -> dict[str, dict[int, float]]:
    """The share of hidden facts that the last validation found, by kind and length."""
    found: dict[str, dict[int, float]] = {}
    for row in validations_last_first(rows):
        for key in (key for key in row if key.startswith(FACTS)):
            kind, _, length = key.removeprefix(FACTS).rpartition("/")
            if length.isdigit() and finite([row[key]]):
                found.setdefault(printable(kind), {})[int(length)] = row[key]
        if found:
            break
    return found


def all_finite(values: list[Any]) -> bool:
    """Whether the values are finite numbers, and so is their sum (which is what makes this quick)."""
    try:
        return math.isfinite(sum(values))
    except TypeError:
        return False


def finite(values: Any) -> list[float]:
    """The finite numbers among the values."""
    values = list(values)
    if all_finite(values):
        return values
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def curves(rows: list[Row], most: int) -> dict[str, Curve]:
    """Every curve of CURVES that has values. A validation has the time of the step before it."""
    result: dict[str, Curve] = {}
    steps, validations, seconds, now = [], [], [], 0.0
    for row in rows:
        if "loss" in row:
            steps.append(row)
            now = row.get("seconds", now)
        elif "val_perplexity" in row:
            validations.append(row)
            seconds.append(now)
    tokens_at, seconds_at = (
        [row["tokens_seen"] for row in steps],
        [row.get("seconds", 0.0) for row in steps],
    )
    for key in CURVES:
        if key == "val_perplexity":
            values = [row[key] for row in validations]
            curve = reduced([row["tokens_seen"] for row in validations], seconds, values, most)
        else:
            values = (
                [memory(row) for row in steps]
                if key == "memory"
                else [row.get(key) for row in steps]
            )
            curve = reduced(tokens_at, seconds_at, values, most)
        if curve["y"]:
            result[key] = curve
    return result


def reduced(tokens: list[float], seconds: list[float], values: list[Any], most: int) -> Curve:
    """The finite values as a curve of at most `most` points, each the mean, least and largest of
    its rows.
    """
    if not all_finite(values):
        kept = [n for n, value in enumerate(values) if finite([value])]
        tokens, seconds, values = (
            [column[n] for n in kept] for column in (tokens, seconds, values)
        )
    size = -(-len(values) // most)  # rows per point
    if size <= 1:
        return {"t": list(tokens), "s": short(seconds), "y": short(values)}
    parts = [values[n : n + size] for n in range(0, len(values), size)]
    middles = [min(n + size // 2, len(values) - 1) for n in range(0, len(values), size)]
    return {
        "t": [tokens[n] for n in middles],
        "s": short(seconds[n] for n in middles),
        "y": short(map(fmean, parts)),
        "lo": short(map(min, parts)),
        "hi": short(map(max, parts)),
    }


def short(values: Any) -> list[float]:
    """Numbers at the five digits that a drawing can show."""
    return [float(f"{value:.5g}") for value in values]
