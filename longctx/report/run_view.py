"""A run as a report shows it: its configuration, its figures, its curves, how it ended, and what it
costs; `watch` follows one that another process trains.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from longctx import files, tables, untrusted
from longctx.runs import checkpoint_index, metrics
from longctx.runs.checkpoint_index import Damaged
from longctx.runs.evaluations import Evaluations, read_evaluations
from longctx.runs.metrics import BY_POSITION, Record, Shown, finite, is_step, line, number
from longctx.runs.metrics_file import Tail, read_records
from longctx.runs.run_folder import checkpoints, is_training, read_config
from longctx.untrusted import opened

# A curve: "t" tokens seen, "s" seconds of training, "y" values; if records were joined, also "lo"
# and "hi" next to the mean "y".
Curve = dict[str, list[float]]
Line = dict[str, list[float]]  # points to draw: "x", such as tokens before, and "y", the losses

PAUSE = 0.5  # seconds between two looks


@dataclass
class RunRecord:
    """What the files of a run hold. `figures` has no key for a metric that its records lack;
    `notes` are remarks for the reader.
    """

    folder: Path
    label: str
    config: dict[str, Any]
    figures: Record
    curves: dict[str, Curve]
    evaluations: Evaluations
    ended: str
    cost: Cost
    notes: list[str]
    lock: dict[str, str]
    positions: Line  # loss over tokens before
    tokenizer: str = ""  # a hash of its tokenizer.json
    documents: str = ""  # the fingerprint of its data; empty if no checkpoint can be read


def read(folder: Path, points: int, price: float | None = None) -> RunRecord:
    """Read the run in `folder`, with at most `points` points in a curve. `price`: of a GPU's hour.

    Raises ValueError or FileNotFoundError, one line, if there is none, and anything for files that
    no run writes.
    """
    config = read_config(folder)
    # Before the records are read: a run that ends in between has written all of them.
    training = is_training(folder)
    records, cut = read_records(folder)
    if not records:
        raise ValueError(
            f"{folder}: no metrics yet; wait for the first line of metrics.jsonl, or start the run "
            "again"
        )
    numbers, lock = metrics.figures(records), kernel_lock(folder)
    run = RunRecord(
        folder,
        label=folder.resolve().name,
        config=config,
        figures=numbers,
        curves=curves(records, points),
        evaluations=read_evaluations(folder),
        ended=ending(numbers["step"], config["max_steps"], training),
        positions=positions(records),
        cost=cost_of(config, numbers, lock, price),
        notes=[f"{folder}: left out as incomplete: {cut} of metrics.jsonl"] if cut else [],
        lock=lock,
    )
    # Two runs have the same tokens if their tokenizers are equal, wherever those came from
    if os.path.lexists(file := folder / "tokenizer.json"):
        text = untrusted.read_text(file, untrusted.TOKENIZER_SIZE, folder)
        run.tokenizer = hashlib.sha256(text.encode()).hexdigest()
    # Files of data.path may change between two runs
    for newest in checkpoints(folder)[-1:]:
        with suppress(Damaged):
            run.documents = str(checkpoint_index.read(newest)["longctx"]["data"])
    return run


def kernel_lock(folder: Path) -> dict[str, str]:
    """Return kernel.lock.json as cells of a table: the kernel, versions, and short hashes of its
    sources and of its results.
    """
    cells: dict[str, str] = {}
    for key, value in untrusted.read_settings(folder / "kernel.lock.json").items():
        if key in ("machine", "versions"):
            cells |= {name: str(version) for name, version in value.items()}
        elif key in ("sources", "fingerprint") and value:
            text = json.dumps(value, sort_keys=True)
            cells[key] = hashlib.sha256(text.encode()).hexdigest()[:10]
        elif isinstance(value, str | bool) and key != "backend":
            cells[key] = str(value)
    return cells


def ending(step: int, steps: int, training: bool) -> str:
    """Say how far a run came and whether it still trains."""
    if training:
        return f"training, step {step:,} of {steps:,}"
    return "finished" if step >= steps else f"stopped at step {step:,} of {steps:,}"


def positions(records: list[Record]) -> Line:
    """Return the loss over the number of tokens before, of the last validation that has it."""
    prefix = f"{BY_POSITION}/"
    for record in reversed(records):
        found = {
            int(key.removeprefix(prefix)): value
            for key, value in record.items()
            if key.startswith(prefix) and finite([value])
        }
        if found:
            return {"x": list(found), "y": short(found.values())}
    return {}


def curves(records: list[Record], points: int) -> dict[str, Curve]:
    """Return the curve of every metric that the page draws and the records hold.

    A record without a time, such as a validation, has the time of the one before it.
    """
    seconds = 0.0
    timed: dict[bool, list[Record]] = {True: [], False: []}
    for record in records:
        seconds = number(record, "seconds", seconds)
        timed[is_step(record)].append(record | {"seconds": seconds})
    result: dict[str, Curve] = {}
    for group in timed.values():
        for metric in metrics.shown(Shown.CURVE):
            drawn = [record for record in group if finite([record.get(metric.key)])]
            if drawn:
                result[metric.key] = reduced(drawn, metric.key, points)
    return result


def reduced(records: list[Record], key: str, points: int) -> Curve:
    """Return the values of `records` under `key` as a curve of at most `points` points, each the
    mean, least and largest of its records.
    """
    values = [record[key] for record in records]
    size = -(-len(records) // points)  # records per point, rounded up
    starts = range(0, len(records), size)
    middles = [records[min(start + size // 2, len(records) - 1)] for start in starts]
    parts = [values[start : start + size] for start in starts]
    curve = {
        "t": [record["tokens_seen"] for record in middles],
        "s": short(record["seconds"] for record in middles),
        "y": short(map(fmean, parts)),
    }
    if size > 1:
        curve |= {"lo": short(map(min, parts)), "hi": short(map(max, parts))}
    return curve


def short(values: Iterable[float]) -> list[float]:
    """Round numbers to the five digits that a drawing can show."""
    return [float(f"{value:.5g}") for value in values]


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
    config: Mapping[str, Any], figures: Record, lock: Mapping[str, str], price: float | None
) -> Cost:
    """Return the cost of a run at `price` for an hour of one GPU.

    `lock` holds the cells of its kernel lock, which name the GPU.
    """
    is_gpu = "memory_peak_gib" in figures
    devices = config.get("devices", 1)
    seconds = next(iter(finite([figures.get("seconds")])), None)
    hours = None
    if is_gpu and seconds is not None:
        # A resume may have had other devices
        hours = number(figures, "device_seconds", seconds * devices) / 3600
    money = None if hours is None or price is None else hours * price
    tokens = number(figures, "tokens_seen")
    device = lock.get("device", "GPU") if is_gpu else "CPU"
    return Cost(device, devices, seconds, hours, money, tokens / money if money else None)


def record_of(run: RunRecord) -> dict[str, Any]:
    """Return the figures of a run as plain numbers, for a file."""
    return {
        "run": run.label,
        "folder": str(run.folder),
        "ended": run.ended,
        "attention": run.config.get("attention.backend"),
        "kernel": run.lock.get("kernel"),
        "fingerprint": run.lock.get("fingerprint"),
        "seq_len": run.config.get("seq_len"),
        **run.cost._asdict(),
        **run.figures,
    }


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a row for each run to a .csv, atomically."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    files.write_for_key("table", path, stream.getvalue())


def watch(run: Path, price: float | None = None) -> None:
    """Print the newest record of a run and the later ones, until no process trains it; then its end
    and its cost. Raises ValueError or OSError, one line, if it cannot be shown.
    """
    console = tables.console()
    with opened(run):
        config, tail = read_config(run), Tail(run)
        # Asked before the records are read, as in `following`.
        training = is_training(run)
        records = tail.records()
        if not records and not training:
            raise ValueError(
                f"{run}: no metrics yet and no process trains it; start the run, or watch another"
            )
        numbers: Record = {key: value for record in records for key, value in record.items()}
        for record in following(run, tail, records[-1:]):
            numbers |= record
            console.print(f"step {record['step']:,}  {line(record, Shown.WATCH)}", soft_wrap=True)
        lock = kernel_lock(run)
        cost = cost_of(config, numbers, lock, price)
        spent = [ending(numbers.get("step", 0), config["max_steps"], is_training(run))]
        spent += [f"hardware {cost.hardware}"]
        spent += [f"kernel {lock['kernel']}"] if "kernel" in lock else []
        spent += [f"GPU hours {cost.gpu_hours:,.2f}"] if cost.gpu_hours is not None else []
        spent += [f"cost {cost.money:,.2f} at {price} an hour"] if cost.money is not None else []
        spent += ["no GPU has a price="] if price is not None and cost.money is None else []
        console.print("  ".join(spent), soft_wrap=True)


def following(folder: Path, tail: Tail, records: list[Record]) -> Iterator[Record]:
    """Yield `records` and the later ones, until the process that trains the run ends."""
    training = True
    while True:
        yield from records
        if not training:
            return
        # Asked before the records are read, so that records of the last moment are not missed.
        training = is_training(folder)
        if training:
            time.sleep(PAUSE)
        records = tail.records()
