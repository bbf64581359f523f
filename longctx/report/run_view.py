"""A run as a report shows it: its configuration, figures and curves, its end, and its costs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from longctx import untrusted
from longctx.runs import checkpoint_index, metrics
from longctx.runs.checkpoint_index import Damaged
from longctx.runs.evaluations import read_evaluations
from longctx.runs.metrics import BY_POSITION, Record, Shown, finite, number
from longctx.runs.metrics_file import read_records
from longctx.runs.run_folder import checkpoints, flat, is_training, read_config

POINTS = 500  # in a curve: about as many as a chart is wide
# Of a curve: "t" tokens seen, "s" seconds of training, "y" values; if records were joined, also
# "lo" and "hi" next to the mean "y". Of other points: "x", such as tokens before, and "y", losses.
Line = dict[str, list[float]]


class RunRecord:
    """What the files of the run in `folder` hold.

    `config` has the fields of kernel.lock.json too, as lock.kernel. `figures` has no key for a
    metric or a cost that is unknown; `price` is of a GPU's hour. Raises ValueError or
    FileNotFoundError, one line, if there is no run, and anything for files that no run writes.
    """

    def __init__(self, folder: Path, price: float | None = None) -> None:
        self.folder = folder
        self.config = read_config(folder) | kernel_lock(folder)
        # Before the records are read: a run that ends in between has written all of them.
        training = is_training(folder)
        records, cut = read_records(folder)
        if not records:
            raise ValueError(f"{folder}: metrics.jsonl is empty; wait, or start the run again")
        # Remarks for the reader
        self.notes = [f"{folder}: left out as incomplete: {cut} of metrics.jsonl"] if cut else []
        figures = metrics.figures(records)
        self.figures = cost_of(self.config, figures, price) | figures
        step, steps = figures["step"], self.config["max_steps"]
        state = "training," if training else "stopped at"
        is_finished = step >= steps and not training
        self.ended = "finished" if is_finished else f"{state} step {step:,} of {steps:,}"
        self.curves = curves(records)
        self.positions = positions(records)  # loss over tokens before
        self.evaluations = read_evaluations(folder)
        self.tokenizer = ""
        # Two runs have the same tokens if their tokenizers are equal, wherever those came from
        if os.path.lexists(file := folder / "tokenizer.json"):
            text = untrusted.read_text(file, untrusted.TOKENIZER_SIZE, folder)
            self.tokenizer = hashlib.sha256(text.encode()).hexdigest()
        self.documents = ""
        # Files of data.path may change between two runs; a damaged checkpoint does not know
        for newest in checkpoints(folder)[-1:]:
            with suppress(Damaged):
                self.documents = str(checkpoint_index.read(newest)["longctx"]["data"])


def kernel_lock(folder: Path) -> dict[str, str]:
    """Return kernel.lock.json as keys of a run: the kernel, versions, and short hashes of its
    sources and of its results.
    """
    lock = untrusted.read_settings(folder / "kernel.lock.json")
    for key in ("sources", "fingerprint"):
        if lock.get(key):
            text = json.dumps(lock[key], sort_keys=True)
            lock[key] = hashlib.sha256(text.encode()).hexdigest()[:10]
    named = {key.rpartition(".")[2]: value for key, value in flat(lock).items() if key != "backend"}
    return {f"lock.{key}": str(x) for key, x in named.items() if isinstance(x, str | bool)}


def positions(records: list[Record]) -> Line:
    """Return the loss over the number of tokens before, of the last validation that has it."""
    prefix = f"{BY_POSITION}/"
    for record in reversed(records):
        members = (key for key in record if key.startswith(prefix))
        if found := line_of((int(key.removeprefix(prefix)), record[key]) for key in members):
            return found
    return {}


def line_of(points: Iterable[tuple[int, Any]]) -> Line:
    """Return the points of finite losses, {} without any."""
    drawn = [(x, y) for x, y in points if finite([y])]
    return {"x": [x for x, _ in drawn], "y": short(y for _, y in drawn)} if drawn else {}


def curves(records: list[Record]) -> dict[str, Line]:
    """Return the curve of every metric that the page draws and the records hold.

    A record without a time, such as a validation, has the time of the one before it.
    """
    seconds = 0.0
    timed: list[Record] = []
    for record in records:
        seconds = number(record, "seconds", seconds)
        timed.append(record | {"seconds": seconds})
    drawn = {
        metric.key: [record for record in timed if finite([record.get(metric.key)])]
        for metric in metrics.shown(Shown.CURVE)
    }
    return {key: reduced(held, key) for key, held in drawn.items() if held}


def reduced(records: list[Record], key: str) -> Line:
    """Return the values of `records` under `key` as a curve of at most POINTS points: the mean, the
    least and the largest of the records that a point joins.
    """
    size = -(-len(records) // POINTS)  # records per point, rounded up
    groups = [records[start : start + size] for start in range(0, len(records), size)]
    middles = [records[min(n * size + size // 2, len(records) - 1)] for n in range(len(groups))]
    values = [[record[key] for record in group] for group in groups]
    curve = {
        "t": [record["tokens_seen"] for record in middles],
        "s": short(record["seconds"] for record in middles),
        "y": short(map(fmean, values)),
    }
    if size > 1:
        curve |= {"lo": short(map(min, values)), "hi": short(map(max, values))}
    return curve


def short(values: Iterable[float]) -> list[float]:
    """Round numbers to the five digits that a drawing can show."""
    return [float(f"{value:.5g}") for value in values]


def cost_of(config: Mapping[str, Any], figures: Record, price: float | None) -> Record:
    """Return the device of a run, their number, and if its records tell them: the gpu_hours of all
    GPUs together, resumes added up, and at `price` for an hour of one the money and the
    tokens_per_money.
    """
    is_gpu = "memory_peak_gib" in figures
    cost: Record = {"device": config.get("lock.device", "GPU") if is_gpu else "CPU"}
    cost["devices"] = config.get("devices", 1)
    if is_gpu and (seconds := number(figures, "seconds")):
        # A resume may have had other devices
        hours = number(figures, "device_seconds", seconds * cost["devices"]) / 3600
        cost["gpu_hours"] = hours
        if price is not None:
            cost["money"] = hours * price
            cost["tokens_per_money"] = number(figures, "tokens_seen") / cost["money"]
    return cost
