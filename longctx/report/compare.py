"""Several runs next to each other: one table, on the terminal and on a page with their curves.

The page is page.html with the data of the runs as JSON in it. It needs no network and no library.
Anybody can name a run: no letter of the data can end the script element that holds them, and the
page makes text nodes of them, never HTML. Whatever the files of a run raise leaves out that run.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from longctx import files
from longctx.config import fields
from longctx.config.train_config import TrainConfig
from longctx.report.run_view import Line, RunRecord, hardware, line_of
from longctx.runs.evaluations import scores
from longctx.runs.metrics import Shown, duration, finite, shown
from longctx.spec.model_config import GPTConfig
from longctx.tables import console, show, text_table
from longctx.untrusted import named, opened

POINTS = 250_000  # in all curves of a page together: 7 MB
STEP = re.compile(r"step-(\d+)")
LOSSES = ("loss", "val_loss", "val_perplexity")  # compared over the same documents alone
COUNTS = ("tokens", "bytes", "words", "standard_error")  # no scores
PER_MONEY = "tokens for 1 of its currency"
# Losses of runs that differ in these are of other tokens. z_loss is no part of the logged loss
DECISIVE = ("data.", "objective.", "model.vocab_size")
# Fingerprints of kernels depend on these
SHAPE = ("seq_len", "precision", "model.channels", "model.heads", "model.kv_heads")


class Table(NamedTuple):
    """Cells as text, a run's label first; `best` are the (row, column) of each column's best
    number.
    """

    headings: list[str]
    rows: list[list[str]]
    best: list[tuple[int, int]]


def compare(
    runs: list[Path], out: Path, price: float | None = None, table: Path | None = None
) -> None:
    """Print the table of the runs and write their page, and the file with a row for each run.

    A folder that is no run is left out, and a note on stderr says so. Raises ValueError or OSError,
    one line, if no run is left.
    """
    found, notes = read_all(runs, price)
    if price is not None and not any("money" in run.figures for run in found):
        notes.append("price= is that of an hour of a GPU, and no run had one")
    view = table_of(found, price)
    # Before anything is printed: a mistake in `out` is one line
    outputs = [("out", out, page(found, view, notes)), ("table", table, csv_of(found))]
    for key, path, text in outputs:
        if path is not None:
            with named(f"{key}={path}", "cannot be written: {}", (OSError,)):
                files.write_text(path, text)
    columns = [
        [Text(cell, "bold green" if (row, n) in view.best else "") for n, cell in enumerate(cells)]
        for row, cells in enumerate(view.rows)
    ]
    # A line for each heading: there are more of them than runs
    _, *lines = zip(view.headings, *columns, strict=True)
    show(text_table("runs", ["run", *(run.label for run in found)], lines))
    for note in notes:
        console(stderr=True).print(f"note: {note}", soft_wrap=True)
    console().print(f"curves     {out}", soft_wrap=True)


def read_all(paths: Sequence[Path], price: float | None) -> tuple[list[RunRecord], list[str]]:
    """Return the runs at `paths`, each once, and notes on them; raises the first problem if no run
    is left, and FileNotFoundError for a path that is none.
    """
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
    points = min(2000, max(60, POINTS // (len(unique) * len(shown(Shown.CURVE)))))
    runs: list[RunRecord] = []
    problems: list[ValueError | OSError] = []
    for path in unique.values():
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: no such folder; give that of a run, as runs/NAME")
        try:
            with opened(path):
                run = RunRecord(path, points, price)
                # Alone first: a value that cannot be shown is found here
                embedded(described(run) | table_of([run], price)._asdict())
            runs.append(run)
        except (ValueError, OSError) as problem:
            problems.append(problem)
    if not runs:
        raise problems[0]
    # Runs in different folders can have the same name
    names = [run.label for run in runs]
    for run in runs:
        if names.count(run.label) > 1:
            run.label = str(run.folder)
    notes = [note for run in runs for note in run.notes]
    notes += [*not_ranked(runs), *lock_differences(runs)]
    return runs, [*notes, *(f"left out: {problem}" for problem in problems)]


def table_of(runs: list[RunRecord], price: float | None) -> Table:
    """Return the table: keys that differ, results, costs, evaluations. The best of a column is
    marked if the runs can be compared in it.
    """
    keys = differing(runs) if len(runs) > 1 else []
    rows = [{"run": run.label} | cells_of(run, keys, price) for run in runs]
    names = dict.fromkeys(name for row in rows for name in row)
    headings = [name for name in names if any(row.get(name) for row in rows)]
    best = [(row, headings.index(name)) for row, name in best_of(runs, rows)]
    return Table(headings, [[row.get(name, "") for name in headings] for row in rows], best)


def cells_of(run: RunRecord, keys: list[str], price: float | None) -> dict[str, str]:
    """Return heading → text of a run, with its values of `keys`."""
    figures, trained = run.figures, run.config["seq_len"]
    cells = {key: configured(run, key) for key in keys}
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
        "hardware": hardware(figures),
        "attention": str(run.config.get("attention.backend", "")),
        "kernel": run.lock.get("kernel", ""),
        "fingerprint": run.lock.get("fingerprint", ""),
        "time": "".join(map(duration, finite([figures.get("seconds")]))),
    }
    costs = {
        "GPU hours": ("gpu_hours", ",.2f"),
        f"cost at {price} an hour": ("money", ",.2f"),
        PER_MONEY: ("tokens_per_money", ",.0f"),
    }
    for heading, (key, spec) in costs.items():
        cells[heading] = f"{figures[key]:{spec}}" if key in figures else ""
    # Named without their step, as in all runs: those of the newest checkpoint replace others
    for content in chain(*run.evaluations):
        name, numbers = re.sub(r"step-\d+-", "", Path(content["file"]).stem), scores(content)
        error = numbers.get("perplexity", 0) * numbers.get("standard_error", 0)
        for key, value in numbers.items():
            if key not in COUNTS:
                more = f" ± {error:,.3f}" if key == "perplexity" and error else ""
                cells[f"{name}: {key}"] = f"{value:,.4f}{more}"
    return cells


def best_of(runs: list[RunRecord], rows: list[dict[str, str]]) -> list[tuple[int, str]]:
    """Return row and heading of each best figure, of none that more than half of the runs share."""
    unranked = LOSSES if not_ranked(runs) else ()
    ranked = [(x.heading, x.key, x.better) for x in shown(Shown.COMPARE) if x.key not in unranked]
    best: list[tuple[int, str]] = []
    for heading, key, better in [*ranked, (PER_MONEY, "tokens_per_money", "max")]:
        values: dict[int, Any] = {
            n: x for n, run in enumerate(runs) if finite([x := run.figures.get(key)])
        }
        if better is None or not values:
            continue
        first = (min if better == "min" else max)(values, key=values.__getitem__)
        cells = [row.get(heading, "").partition(" ±")[0] for row in rows]
        winners = [(n, heading) for n, cell in enumerate(cells) if cell == cells[first]]
        best += winners if 2 * len(winners) <= sum(map(bool, cells)) else []
    return best


def differing(runs: list[RunRecord]) -> list[str]:
    """Return the keys of the configurations whose values are not the same in all runs."""
    has_tokenizer = bool(runs[0].tokenizer) and len({run.tokenizer for run in runs}) == 1
    return [
        key
        for key in dict.fromkeys(key for run in runs for key in run.config)
        if fields.declared_as(TrainConfig, key).compared
        and not (key == "data.tokenizer" and has_tokenizer)
        # init= decides what only some kinds of models have, as a whole config.json
        and (not key.startswith("model.") or key.split(".")[1] in GPTConfig.__dataclass_fields__)
        and len({configured(run, key) for run in runs}) > 1
    ]


def configured(run: RunRecord, key: str) -> str:
    """Write a value of the configuration, an absolute path by its name alone; a dash if the run
    has no such key.
    """
    value = run.config.get(key, "–")
    is_path = isinstance(value, str) and value.startswith("/")
    return Path(value).name if is_path else fields.shown(value)


def not_ranked(runs: list[RunRecord]) -> list[str]:
    """Return a note if the losses of the runs cannot be compared."""
    first, *others = map(documents_of, runs)
    keys = {key for other in others for key in first | other if first.get(key) != other.get(key)}
    # The same keys may name other files; a run without a checkpoint does not know its own
    if len({run.documents for run in runs if run.documents}) > 1:
        keys.add("the documents themselves")
    if not keys:
        return []
    return [
        "losses are not ranked: they are of other documents, tokens or objectives "
        f"({', '.join(sorted(keys))} differ); across tokenizers "
        "compare the bits per byte of eval.py on the same documents"
    ]


def documents_of(run: RunRecord) -> dict[str, Any]:
    """Return the keys that decide the documents of a run, their tokens, and their loss.

    The hash of the run's tokenizer, if it has one, replaces the keys that tell its origin.
    """
    config = run.config
    keys = {key for key in config if key.startswith(DECISIVE)} - {"data.cache", "objective.z_loss"}
    # KTO's baseline is a mean over a micro-batch on all devices, in a validation too
    if config.get("objective.name") == "kto":
        keys |= {"batch_size", "devices", "context.degree"}
    values = {key: config.get(key) for key in keys}
    values["val_rows"] = config.get("val_rows", 0) * config["seq_len"]
    of_file = {"data.tokenizer": run.tokenizer, "data.vocab_size": None}
    return values | of_file if run.tokenizer else values


def lock_differences(runs: list[RunRecord]) -> list[str]:
    """Return a note for each field in which kernel locks of one backend differ."""
    # (field, backend, shape of a fingerprint) → value → the runs that have it
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for run in runs:
        for field, value in run.lock.items():
            keys = ("attention.backend", *(SHAPE if field == "fingerprint" else ()))
            same = (field, *(configured(run, key) for key in keys))
            groups.setdefault(same, {}).setdefault(value, []).append(run.label)
    return [
        f"kernel locks of {backend} differ in {field}: "
        + "; ".join(f"{value} ({', '.join(labels)})" for value, labels in values.items())
        for (field, backend, *_), values in groups.items()
        if len(values) > 1
    ]


def csv_of(runs: list[RunRecord]) -> str:
    """Return the numbers of the runs as a .csv: a row for each, with the keys that differ."""
    keys = differing(runs)
    records = [
        {
            "run": run.label,
            "folder": str(run.folder),
            "ended": run.ended,
            "attention": run.config.get("attention.backend"),
            "kernel": run.lock.get("kernel"),
            "fingerprint": run.lock.get("fingerprint"),
            "seq_len": run.config.get("seq_len"),
            **run.figures,
            **{f"config.{key}": configured(run, key) for key in keys},
        }
        for run in runs
    ]
    stream = io.StringIO()
    columns = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def page(runs: list[RunRecord], table: Table, notes: list[str]) -> str:
    """Return the page of the runs."""
    data = {
        "curves": headings(Shown.CURVE),
        "lengths": headings(Shown.CONTEXT),
        "runs": [described(run) for run in runs],
        "table": table._asdict(),
        "notes": notes,
    }
    template = (resources.files("longctx.report") / "page.html").read_text(encoding="utf-8")
    return template.replace("DATA_AS_JSON", embedded(data), 1)


def headings(view: Shown) -> dict[str, str]:
    """Return key and title of each metric that is drawn in `view`."""
    return {metric.key: metric.heading for metric in shown(view)}


def described(run: RunRecord) -> dict[str, Any]:
    """Return the data that the page draws of a run."""
    return {
        "label": run.label,
        "backend": str(run.config.get("attention.backend", "")),
        "seq_len": run.config["seq_len"],
        "figures": {
            key: x for key in headings(Shown.CONTEXT) if finite([x := run.figures.get(key)])
        },
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
