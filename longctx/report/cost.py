"""What a run costs: its machine, its time, GPU hours, money at a price; and a row for each run as
CSV or JSON.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longctx import files
from longctx.report.run_view import Run
from longctx.runs.evaluations import without_infinite
from longctx.runs.metrics import Row, finite, number

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with which a spreadsheet begins to compute


class Cost(NamedTuple):
    """The machine of a run and what its time there costs.

    seconds: wall time since training began, validations and saves included, resumes added up.
    gpu_hours: of all GPUs together; None on a CPU. money, tokens_per_money: None without a price.
    """

    device: str
    devices: int
    seconds: float | None
    gpu_hours: float | None
    money: float | None
    tokens_per_money: float | None

    @property
    def hardware(self) -> str:
        """Return the number and the name of the devices."""
        return f"{self.devices} × {self.device}" if self.devices > 1 else self.device


def cost_of(
    config: Mapping[str, Any], figures: Row, lock: Mapping[str, str], price: float | None
) -> Cost:
    """Return the cost of a run at `price` for an hour of one GPU.

    `lock` holds the cells of its kernel lock, which name the GPU.
    """
    is_gpu = "memory_peak_gib" in figures
    devices = config.get("devices", 1)
    devices = devices if isinstance(devices, int) and devices > 0 else 1
    seconds = next(iter(finite([figures.get("seconds")])), None)
    hours = seconds * devices / 3600 if is_gpu and seconds is not None else None
    money = None if hours is None or price is None else hours * price
    tokens = number(figures, "tokens_seen")
    device = lock.get("device", "GPU") if is_gpu else "CPU"
    return Cost(device, devices, seconds, hours, money, tokens / money if money else None)


def record_of(run: Run, price: float | None) -> dict[str, Any]:
    """Return the figures of a run as plain numbers, for a file."""
    cost = cost_of(run.config, run.figures, run.lock, price)
    return {
        "run": run.label,
        "folder": str(run.folder),
        "ended": run.ended,
        "attention": run.config.get("attention.backend"),
        "kernel": run.lock.get("kernel"),
        "fingerprint": run.lock.get("fingerprint"),
        "seq_len": run.config.get("seq_len"),
        **cost._asdict(),
        **run.figures,
    }


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a row for each run to a .csv, or an object for each to a .json, atomically."""
    if path.suffix == ".json":
        text = json.dumps(without_infinite(list(records)), indent=1, allow_nan=False) + "\n"
    else:
        columns = list(dict.fromkeys(key for record in records for key in record))
        stream = io.StringIO()
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writerow({key: _cell(key) for key in columns})
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in records)
        text = stream.getvalue()
    files.write_for_key("table", path, text)


def _cell(value: Any) -> Any:
    """Return a value whose text no spreadsheet takes for a formula."""
    is_formula = isinstance(value, str) and value.startswith(FORMULA)
    return f"'{value}" if is_formula else value
