"""Several runs next to each other: one table, on the terminal and on a page with their curves.

The page is page.html with the data of the runs as JSON in it. It needs no network and no library.
Anybody can name a run: no letter of the data can end the script element that holds them, and the
page makes text nodes of them, never HTML. Whatever the files of a run raise leaves out that run.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from itertools import chain, product
from math import floor, log10
from pathlib import Path
from statistics import fmean
from typing import Any

from longctx import files
from longctx.config import fields
from longctx.config.train_config import TrainConfig
from longctx.runs import checkpoint_index, metrics
from longctx.runs.evaluations import read_evaluations, scores
from longctx.runs.metrics import BY_POSITION, Record, Shown, duration, finite, number, shown
from longctx.runs.metrics_file import read_records
from longctx.runs.run_folder import checkpoints, closest_to, flat, is_training, read_config
from longctx.spec.model_config import GPTConfig
from longctx.tables import console, show
from longctx.untrusted import TOKENIZER_SIZE, named, opened, read_settings, read_text

STEP = re.compile(r"step-(\d+)")
COUNTS = ("tokens", "bytes", "words", "standard_error")  # no scores
# Losses of runs that differ in these are of other tokens. z_loss is no part of the logged loss
DECISIVE = ("data.", "objective.", "model.vocab_size")
BACKENDS = ("attention.window", "attention.backend")
POINTS = 500  # in a curve: about as many as a chart is wide
# Of a curve: "t" tokens seen, "s" seconds of training, "y" values; if records were joined, also
# "lo" and "hi" next to the mean "y". Of other points: "x", such as tokens before, and "y", losses.
Line = dict[str, list[float]]
Table = list[list[str]]  # lines of a heading and a cell for each run; the first line has labels


def compare(
    runs: list[Path], out: Path, price: float | None = None, table: Path | None = None
) -> None:
    """Print the table of the runs and write their page, and the file with a row for each run.

    A folder that is no run is left out, and a note on stderr says so. Raises ValueError or OSError,
    one line, if no run is left, or a path is missing.
    """
    found, notes = read_all(runs, price)
    if price is not None and not any("money" in run.figures for run in found):
        notes.append("price= is that of an hour of a GPU, and no run had one")
    lines = table_of(found, price)
    # Before anything is printed: a mistake in `out` is one line
    outputs = {"out": (out, page(found, lines, notes)), "table": (table, csv_of(found))}
    for key, (path, text) in outputs.items():
        if path is not None:
            with named(f"{key}={path}", "cannot be written: {}", (OSError,)):
                files.write_text(path, text)
    # A line for each heading: there are more of them than runs
    show("runs", lines[0], lines[1:])
    for note in notes:
        console(stderr=True).print(f"note: {note}", soft_wrap=True)
    console().print(f"curves     {out}", soft_wrap=True)


def read_all(paths: Sequence[Path], price: float | None) -> tuple[list[RunRecord], list[str]]:
    """Return the runs at `paths`, each once, and notes; raise the first problem if none is left."""
    missing = (path for path in paths if not path.exists())
    remedy = "give the folder of a run"
    fields.refuse_first(f"{x}: no such folder; {closest_to(x) or remedy}" for x in missing)
    unique = {x.resolve(): x for x in paths} | {x.resolve(): x for x in reversed(paths)}
    runs, problems = list[RunRecord](), list[ValueError | OSError]()
    for path in unique.values():
        try:
            with opened(path):
                run = RunRecord(path, price)
                # Alone first: a value that cannot be shown is found here
                embedded([described(run), table_of([run], price)])
            runs.append(run)
        except (ValueError, OSError) as problem:
            problems.append(problem)
    if not runs:
        raise problems[0]
    notes = [note for run in runs for note in run.notes] + incomparable(runs)
    return runs, [*notes, *(f"left out: {problem}" for problem in problems)]


def table_of(runs: list[RunRecord], price: float | None) -> Table:
    """Return the table: keys that differ, results, costs, evaluations."""
    keys = sorted(differing(runs), key=lambda key: key.startswith(("lock.", "plugins")))
    columns = [cells_of(run, keys, price) for run in runs]
    names = dict.fromkeys(chain(*columns))
    lines = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return [line for line in lines if any(line[1:])]


def cells_of(run: RunRecord, keys: list[str], price: float | None) -> dict[str, str]:
    """Return heading → text of a run, with its values of `keys`."""
    figures, trained = run.figures, run.config["seq_len"]
    cells = {"run": str(run.folder)} | {key: configured(run, key) for key in keys}
    for metric in shown(Shown.COMPARE):
        if metric.key in figures:
            cells[metric.heading] = metric.format(figures[metric.key])
    errors = finite(figures.get(key) for key in ("val_perplexity", "val_loss_error"))
    if len(errors) == 2:
        cells["val perplexity"] += f" ± {errors[0] * errors[1]:,.2f}"
    longest = max((x["context"] for x in run.evaluations.perplexities), default=0)
    longer = f", evaluated at {longest:,}" if longest > trained else ""
    cells |= {
        "context trained at": f"{trained:,}{longer}",
        "ended": run.ended,
        "hardware": f"{figures['devices']} × {figures['device']}",
        "attention": described(run)["backend"],
        "kernel": run.config.get("lock.kernel", ""),
        "time": "".join(map(duration, finite([figures.get("seconds")]))),
    }
    costs = {"GPU hours": "gpu_hours", f"cost at {price} an hour": "money"}
    costs |= {"tokens for 1 of its currency": "tokens_per_money"}
    for heading, key in costs.items():
        cells[heading] = f"{figures[key]:,.2f}" if key in figures else ""
    # Named without their step, as in all runs: those of the newest checkpoint replace others
    for content in chain(*run.evaluations):
        name, numbers = re.sub(r"step-\d+-", "", Path(content["file"]).stem), scores(content)
        error = numbers.get("perplexity", 0) * numbers.get("standard_error", 0)
        is_share = "kinds" in content or "ruler" in content  # eval.py prints percents of these
        for key, value in numbers.items():
            if key not in COUNTS:
                has_error = key == "perplexity" and error
                digits = max(0, 1 - floor(log10(error))) if has_error else 4  # two figures of it
                text = f"{value:,.{digits}f}" + (f" ± {error:,.{digits}f}" if has_error else "")
                cells[f"{name}: {key}"] = f"{value:.1%}" if is_share else text
    return cells


def differing(runs: list[RunRecord]) -> list[str]:
    """Return the keys of configurations and kernel locks that are not the same in all runs."""
    has_tokenizer = bool(runs[0].tokenizer) and len({run.tokenizer for run in runs}) == 1
    return [
        key
        for key in dict.fromkeys(key for run in runs for key in run.config)
        if fields.declared_as(TrainConfig, key).compared
        and not (key in ("data.tokenizer", "data.vocab_size") and has_tokenizer)
        # init= decides what only some kinds of models have, as a whole config.json
        and (not key.startswith("model.") or key.split(".")[1] in GPTConfig.__dataclass_fields__)
        and len({configured(run, key) for run in runs}) > 1
    ]


def configured(run: RunRecord, key: str) -> str:
    """Write a value of the configuration: of an absolute path the name, and of a plugin the
    beginning of its hash too; a dash if the run has no such key.
    """
    value = run.config.get(key, "–")
    if key == "plugins":
        return re.sub(r"/[^,\]]*/|sha256:|(?<=sha256:.{8})\w+", "", fields.shown(value))
    return Path(value).name if str(value).startswith("/") else fields.shown(value)


def incomparable(runs: list[RunRecord]) -> list[str]:
    """Return a note if the losses of the runs cannot be compared."""
    first, *others = map(documents_of, runs)
    keys = {key for other in others for key in first | other if first.get(key) != other.get(key)}
    # The same keys may name other files; a run without a checkpoint does not know its own
    if len({run.documents for run in runs if run.documents}) > 1:
        keys.add("the documents themselves")
    note = f"losses cannot be compared: {', '.join(sorted(keys))} differ; "
    note += "across tokenizers compare the bits per byte of eval.py on the same documents"
    return [note] if keys else []


def documents_of(run: RunRecord) -> dict[str, Any]:
    """Return the keys that decide the documents of a run, their tokens, and their loss."""
    # The hash of the run's tokenizer, if it has one, replaces the keys that tell its origin
    config = run.config
    keys = {key for key in config if key.startswith(DECISIVE)} - {"data.cache", "objective.z_loss"}
    # KTO's baseline is a mean over a micro-batch on all devices, in a validation too
    if config.get("objective.name") == "kto":
        keys |= {"batch_size", "devices", "context.degree"}
    values = {key: config.get(key) for key in keys}
    values["val_rows"] = config.get("val_rows", 0) * config["seq_len"]
    of_file = {"data.tokenizer": run.tokenizer, "data.vocab_size": None}
    return values | of_file if run.tokenizer else values


def csv_of(runs: list[RunRecord]) -> str:
    """Return the numbers of the runs as a .csv: a row for each, with the keys that differ."""
    locks = "lock.kernel", "lock.fingerprint"
    keys = dict.fromkeys([*BACKENDS, *locks, "seq_len", *differing(runs)])
    records = [
        {"run": str(run.folder), "ended": run.ended, **run.figures}
        | {f"config.{key}": configured(run, key) for key in keys}
        for run in runs
    ]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, dict.fromkeys(chain(*records)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def page(runs: list[RunRecord], table: Table, notes: list[str]) -> str:
    """Return the page of the runs."""
    data = {
        "curves": headings(Shown.CURVE),
        "lengths": headings(Shown.CONTEXT),
        "runs": [described(run) for run in runs],
        "table": list(zip(*table, strict=True)),
        "notes": notes,
    }
    template = (resources.files("longctx.report") / "page.html").read_text(encoding="utf-8")
    return template.replace("DATA_AS_JSON", embedded(data), 1)


def headings(view: Shown) -> dict[str, str]:
    """Return key and title of each metric that is drawn in `view`."""
    return {metric.key: metric.heading for metric in shown(view)}


def described(run: RunRecord) -> dict[str, Any]:
    """Return the data that the page draws of a run."""
    drawn = {key: run.figures.get(key) for key in headings(Shown.CONTEXT)}
    return {
        "label": str(run.folder),
        "backend": "+".join(filter(None, map(run.config.get, BACKENDS))),
        "seq_len": run.config["seq_len"],
        "figures": {key: x for key, x in drawn.items() if finite([x])},
        "curves": run.curves,
        "positions": run.positions or evaluated(run, "by_position", "first"),
        "contexts": evaluated(run, "by_context", "context"),
    }


def evaluated(run: RunRecord, key: str, x: str) -> Line | None:
    """Return the losses over `x` in the rows `key` of an evaluation of the run's own documents that
    validate: of the newest checkpoint, in its longest context.
    """
    contents = [c for c in run.evaluations.perplexities if c["file"].startswith("val-")]
    contents.sort(key=lambda c: (STEP.findall(c["file"]), c["context"]), reverse=True)
    lines = (line_of((row[x], row["loss"]) for row in c.get(key) or []) for c in contents)
    return next(filter(None, lines), None)


def embedded(data: Any) -> str:
    """Return JSON that can be in a script element: without `<`, `>` and `&`, and in ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# A run


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
        fields.refuse((not records, f"{folder}: metrics.jsonl is empty; wait, or start it again"))
        # Remarks for the reader
        self.notes = [f"{folder}: left out as incomplete: {cut} of metrics.jsonl"] if cut else []
        figures = metrics.figures(records)
        self.figures = cost_of(self.config, figures, price) | figures
        step, steps = figures["step"], self.config["max_steps"]
        state = f"{'training,' if training else 'stopped at'} step {step:,} of {steps:,}"
        self.ended = "finished" if step >= steps and not training else state
        self.curves = curves(records)
        self.positions = positions(records)  # loss over tokens before
        self.evaluations = read_evaluations(folder)
        self.tokenizer = ""
        # Two runs have the same tokens if their tokenizers are equal, wherever those came from
        if os.path.lexists(file := folder / "tokenizer.json"):
            text = read_text(file, TOKENIZER_SIZE, folder)
            self.tokenizer = hashlib.sha256(text.encode()).hexdigest()
        self.documents = ""
        # Files of data.path may change between two runs; a damaged checkpoint does not know
        for newest in checkpoints(folder)[-1:]:
            with suppress(ValueError):
                self.documents = str(checkpoint_index.read(newest)["longctx"]["data"])


def kernel_lock(folder: Path) -> dict[str, str]:
    """Return kernel.lock.json as keys of a run, with short hashes of sources and of results."""
    lock = read_settings(folder / "kernel.lock.json")
    for own, key in product((lock, lock.get("windows", {})), ("sources", "fingerprint")):
        if own.get(key):
            text = json.dumps(own[key], sort_keys=True)
            own[key] = hashlib.sha256(text.encode()).hexdigest()[:10]
    named = {x.replace("machine.", ""): y for x, y in flat(lock).items() if x != "backend"}
    return {f"lock.{key}": str(x) for key, x in named.items() if isinstance(x, str | bool)}


def positions(records: list[Record]) -> Line:
    """Return the loss over the number of tokens before, of the last validation that has it."""
    prefix = f"{BY_POSITION}/"
    lines = (
        line_of((int(key.removeprefix(prefix)), x[key]) for key in x if key.startswith(prefix))
        for x in reversed(records)
    )
    return next(filter(None, lines), {})


def line_of(points: Iterable[tuple[int, Any]]) -> Line:
    """Return the points of finite losses, {} without any."""
    drawn = [(x, y) for x, y in points if finite([y])]
    return {"x": [x for x, _ in drawn], "y": short(y for _, y in drawn)} if drawn else {}


def curves(records: list[Record]) -> dict[str, Line]:
    """Return the curve of every metric that the page draws and the records hold."""
    # A record without a time, such as a validation, has the time of the one before it
    seconds, timed = 0.0, list[Record]()
    for record in records:
        seconds = number(record, "seconds", seconds)
        timed.append(record | {"seconds": seconds})
    drawn = {
        metric.key: [record for record in timed if finite([record.get(metric.key)])]
        for metric in shown(Shown.CURVE)
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
    # Not by its devices now: before a resume it may have had others
    if is_gpu and (hours := number(figures, "device_seconds") / 3600):
        cost["gpu_hours"] = hours
        if price is not None:
            cost["money"] = hours * price
            cost["tokens_per_money"] = number(figures, "tokens_seen") / cost["money"]
    return cost
