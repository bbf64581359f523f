"""A run as a report shows it: its configuration, its figures, its curves, and how it ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from longctx import untrusted
from longctx.runs import metrics
from longctx.runs.evaluations import Evaluations, Line, read_evaluations
from longctx.runs.metrics import BY_POSITION, FACTS_FOUND, Row, Shown, finite, is_step
from longctx.runs.metrics_file import odd_value, read_rows
from longctx.runs.run_folder import NotARun, is_training, read_config

# A curve: "t" tokens seen, "s" seconds of training, "y" values; if rows were joined, also "lo" and
# "hi" next to the mean "y"; if they have a standard error, the values below and above it.
Curve = dict[str, list[float]]


@dataclass
class Run:
    """`figures` has no key for a metric that the run's rows lack; `notes` are remarks on its files
    for the reader.
    """

    folder: Path
    label: str
    config: dict[str, Any]
    figures: Row
    curves: dict[str, Curve]
    evaluations: Evaluations
    ended: str
    notes: list[str] = field(default_factory=list)
    lock: dict[str, str] = field(default_factory=dict)
    tokenizer: str = ""  # a hash of its tokenizer.json; empty if that cannot be read
    positions: Line = field(default_factory=dict)  # loss over tokens before
    facts: dict[str, dict[int, float]] = field(default_factory=dict)  # kind → length → share


def read(folder: Path, points: int) -> Run:
    """Read the run in `folder`, with at most `points` points in a curve.

    Raises NotARun or FileNotFoundError, one line, if there is none.
    """
    config = read_config(folder)
    # Before the rows are read: a run that ends in between has written all of them.
    training = is_training(folder)
    rows, cut = read_rows(folder)
    if not rows:
        raise NotARun(
            f"{folder}: no metrics yet; wait for the first row of metrics.jsonl, or start the run "
            "again"
        )
    if odd := odd_value(rows):
        raise NotARun(f"{folder}: {odd} in metrics.jsonl, which no run writes; take that line out")
    numbers = metrics.figures(rows)
    # A broken evaluation or lock costs the run no other figure, so it is only a note.
    run = Run(
        folder,
        label=folder.resolve().name,
        config=config,
        figures=numbers,
        curves=curves(rows, points),
        evaluations=read_evaluations(folder),
        ended=ending(numbers["step"], config.get("max_steps"), training),
        positions=positions(rows),
        facts=facts(rows),
    )
    if cut:
        run.notes.append(f"{folder}: left out as incomplete: {cut} of metrics.jsonl")
    for path in run.evaluations.unreadable:
        run.notes.append(f"{path}: not an evaluation's JSON, left out")
    # Two runs have the same tokens if their tokenizers are equal, wherever those came from.
    with (
        suppress(OSError, ValueError),
        untrusted.open_file(folder / "tokenizer.json", untrusted.TOKENIZER_SIZE, folder) as file,
    ):
        run.tokenizer = hashlib.sha256(file.read()).hexdigest()
    try:
        run.lock = kernel_lock(folder)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError):
        run.notes.append(f"{folder}: kernel.lock.json cannot be read, left out")
    return run


def kernel_lock(folder: Path) -> dict[str, str]:
    """Return kernel.lock.json as cells of a table: the kernel, versions, and short hashes of its
    sources and of its results.
    """
    lock = untrusted.read_json(folder / "kernel.lock.json", within=folder)
    cells: dict[str, str] = {}
    for key, value in lock.items():
        if key in ("machine", "versions"):
            cells |= {name: str(version) for name, version in value.items()}
        elif key in ("sources", "fingerprint"):
            text = json.dumps(value, sort_keys=True)
            cells[key] = hashlib.sha256(text.encode()).hexdigest()[:10]
        elif isinstance(value, str | bool):
            cells[key] = str(value)
    cells.pop("backend", None)
    return cells


def ending(step: int, steps: Any, training: bool) -> str:
    """Say how far a run came and whether it still trains."""
    of_steps = f" of {steps:,}" if isinstance(steps, int) else ""
    if training:
        return f"training, step {step:,}{of_steps}" if of_steps else "training"
    if isinstance(steps, int) and step >= steps:
        return "finished"
    return f"stopped at step {step:,}{of_steps}"


def positions(rows: list[Row]) -> Line:
    """Return the loss over the number of tokens before, of the last validation that has it."""
    for members in families_last_first(rows, BY_POSITION):
        if len(losses := finite(members.values())) == len(members):
            return {"x": [int(key) for key in members], "y": short(losses)}
    return {}


def facts(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Return the share of pass keys that the last validation found, by kind and length."""
    shares: dict[str, dict[int, float]] = {}
    for members in families_last_first(rows, FACTS_FOUND):
        for key, share in members.items():
            kind, _, length = key.rpartition("/")
            if length.isdecimal() and finite([share]):
                shares.setdefault(kind, {})[int(length)] = share
        if shares:
            break
    return shares


def families_last_first(rows: list[Row], family: str) -> Iterator[Row]:
    """Yield the members of a family of keys in each validation that has some, the newest first;
    without the family's name.
    """
    prefix = f"{family}/"
    for row in reversed(rows):
        if is_step(row):
            continue
        members = {
            key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)
        }
        if members:
            yield members


def curves(rows: list[Row], points: int) -> dict[str, Curve]:
    """Return the curve of every metric that the page draws and the rows hold.

    A row without a time, such as a validation, has the time of the row before it.
    """
    now = 0.0
    timed: dict[bool, list[tuple[Row, float]]] = {True: [], False: []}
    for row in rows:
        now = next(iter(finite([row.get("seconds")])), now)
        timed[is_step(row)].append((row, now))
    result: dict[str, Curve] = {}
    for group in timed.values():
        tokens = [row["tokens_seen"] for row, _ in group]
        seconds = [time for _, time in group]
        for metric in metrics.shown(Shown.CURVE):
            column = [row.get(metric.key) for row, _ in group]
            curve = reduced(tokens, seconds, column, points)
            if curve["y"]:
                result[metric.key] = curve
                if metric.key == "val_perplexity":
                    result[metric.key] |= error_band(curve, [row for row, _ in group])
    return result


def error_band(curve: Curve, rows: list[Row]) -> Curve:
    """Return one standard error below and above the points of a curve of perplexities, as "lo" and
    "hi"; {} if there is none, or the curve has them of joined rows.
    """
    errors = {
        row["tokens_seen"]: x
        for row in rows
        if isinstance(x := row.get("val_loss_error"), int | float) and isfinite(x)
    }
    if not errors or "lo" in curve:
        return {}
    points = [(y, y * errors.get(t, 0.0)) for t, y in zip(curve["t"], curve["y"], strict=True)]
    return {"lo": short(y - e for y, e in points), "hi": short(y + e for y, e in points)}


def reduced(tokens: list[float], seconds: list[float], values: list[Any], points: int) -> Curve:
    """Return the finite values as a curve of at most `points` points, each the mean, least and
    largest of its rows.
    """
    drawn = [n for n, x in enumerate(values) if isinstance(x, int | float) and isfinite(x)]
    tokens, seconds, values = ([column[n] for n in drawn] for column in (tokens, seconds, values))
    # Rows per point, rounded up.
    size = -(-len(values) // points)
    if size <= 1:
        return {"t": tokens, "s": short(seconds), "y": short(values)}
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
    """Round numbers to the five digits that a drawing can show."""
    return [float(f"{value:.5g}") for value in values]
