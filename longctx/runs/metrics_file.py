"""metrics.jsonl of a run folder: a line per row. Torch-free.

The only reader of that file: training, evaluation and reports use it alike. It grows, so a run that
still trains or was killed may leave its last line cut.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from longctx import files, untrusted
from longctx.runs.metrics import BY_POSITION, SAMPLE, Row
from longctx.runs.run_folder import NotARun

LARGEST = 1e300  # a sum of 100 million such numbers is still a float


def read(folder: Path) -> list[Row]:
    """The rows of metrics.jsonl, [] where there is none; lines that hold no row are left out."""
    return read_rows(folder)[0]


def read_rows(folder: Path) -> tuple[list[Row], str]:
    """The rows of metrics.jsonl, and which of its lines hold none, such as a last one cut off by a
    kill ("" if all do).

    Raises NotARun if it is no regular file in `folder`.
    """
    try:
        with untrusted.open_file(folder / "metrics.jsonl", within=folder) as file:
            content = file.read()
    except FileNotFoundError:
        return [], ""
    except ValueError as error:
        raise NotARun(str(error)) from error
    lines = [line for line in content.decode("utf-8", "replace").split("\n") if line]
    try:
        values = json.loads(f"[{','.join(lines)}]")  # twice as fast as line by line
        if len(values) != len(lines):
            values = [parsed(line) for line in lines]
    except (ValueError, RecursionError):
        values = [parsed(line) for line in lines]
    wrong = [number for number, value in enumerate(values) if not is_row(value)]
    rows = [value for value in values if is_row(value)] if wrong else values
    if wrong == [len(values) - 1]:
        return rows, "the last line"
    return rows, f"{len(wrong)} of {len(values):,} lines" if wrong else ""


def parsed(line: str) -> Row | None:
    """The row in a line of metrics.jsonl; None if there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if is_row(value) else None


def is_row(value: Any) -> bool:
    """Whether a value is a row as training logs them."""
    return (
        isinstance(value, dict)
        and type(value.get("step")) is int
        and type(value.get("tokens_seen")) is int
    )


def odd_value(rows: list[Row]) -> str:
    """Return the first `key=value` that no run writes, such as a list; empty if there is none."""
    for row in rows:
        for key, value in row.items():
            if value is None or (key == SAMPLE and isinstance(value, str)):
                continue
            is_number = isinstance(value, int | float) and not LARGEST < abs(value) < math.inf
            family, _, position = key.partition("/")
            if not is_number or (family == BY_POSITION and not position.isdecimal()):
                return f"{key}={value}"[:80]
    return ""


def drop_after(folder: Path, step: int) -> None:
    """Remove the rows of steps past `step`, which a resumed run computes again."""
    rows = [row for row in read(folder) if row["step"] <= step]
    files.write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
