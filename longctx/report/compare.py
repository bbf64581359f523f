"""Several runs next to each other: tables on the terminal, and a page with their curves.

The page is page.html with the data of the runs as JSON in it. It needs no network and no library.
Anybody can name a run: no letter of the data can end the script element that holds them, and the
page makes text nodes of them, never HTML.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.table import Table as RichTable
from rich.text import Text

from longctx import files
from longctx.config import fields
from longctx.config.command_config import CompareOptions
from longctx.config.train_config import default_val_every, default_warmup
from longctx.report.run_view import Run, read, record_of, write_records
from longctx.runs.metrics import METRICS, STEP_PARTS, Metric, Row, Shown, duration, finite, shown
from longctx.tables import console, show, text_table

POINTS = 250_000  # in all curves of a page together: 7 MB
# The place of a run and of its caches changes none of its results
NOT_COMPARED = {"name", "runs", "resume", "data.cache", "dry_run"}
# key → its leading key, and its default by that; left out if all runs have the default
DEFAULTS = {
    "warmup_steps": ("max_steps", default_warmup),
    "val_every": ("max_steps", default_val_every),
}
# key → its leading key; left out if the leading key tells the runs apart too
FOLLOWS = {
    "data.vocab_size": "data.tokenizer",
    "model.vocab_size": "data.tokenizer",
    "model.context": "init",
    "attention.options.kernel": "attention.backend",
}

STEP = re.compile(r"step-(\d+)")

Pivoted = tuple[list[str], Mapping[Any, str]]  # first cells of a row, and other cells by column


class Table(NamedTuple):
    """Cells as text, a run's label first; `best` are the (row, column) of each column's best
    number.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    best: Collection[tuple[int, int]] = ()
    keys: int = 1  # columns that name a row


def compare(options: CompareOptions) -> None:
    """Print the tables of the runs and write their page, and the table with a row for each run.

    A folder that is no run is left out, and a note on stderr says so. Raises ValueError or OSError,
    one line, if no run is left.
    """
    runs, notes = read_all(options.runs, options.price)
    if options.price is not None and all(run.cost.money is None for run in runs):
        notes.append("price= is that of an hour of a GPU, and no run had one")
    tables = all_tables(runs, options.price)
    # Before anything is printed: a mistake in `out` is one line
    write_page(options.out, runs, tables, notes)
    if options.table is not None:
        keys = differing(runs)
        rows = [
            record_of(run) | {f"config.{key}": configured(run, key) for key in keys} for run in runs
        ]
        write_records(options.table, rows)
    for view in tables:
        show(rendered(view), view.keys)
        print()
    for note in notes:
        line = note if note.startswith("warning: ") else f"note: {note}"
        console(stderr=True).print(line, soft_wrap=True)
    console().print(f"curves     {options.out}", soft_wrap=True)


def read_all(paths: Sequence[Path], price: float | None) -> tuple[list[Run], list[str]]:
    """Return the runs at `paths`, each once, and notes on them; raises the first problem if no run
    is left.
    """
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
    points = min(2000, max(60, POINTS // (len(unique) * len(shown(Shown.CURVE)))))
    runs: list[Run] = []
    problems: list[ValueError] = []
    for path in unique.values():
        try:
            runs.append(read(path, points, price))
        except ValueError as problem:
            problems.append(problem)
    if not runs:
        raise problems[0]
    # Runs in different folders can have the same name
    counts = Counter(run.label for run in runs)
    for run in runs:
        if counts[run.label] > 1:
            run.label = str(run.folder)
    notes = [note for run in runs for note in run.notes]
    notes += [*not_ranked(runs), *lock_differences(runs)]
    return runs, [*notes, *(f"left out: {problem}" for problem in problems)]


def all_tables(runs: list[Run], price: float | None) -> list[Table]:
    """Return every table that has something to show."""
    locks = pivot("kernel locks", ["run"], [([run.label], run.lock) for run in runs if run.lock])
    evaluated = [make(runs) for make in (evaluations, tasks, passkeys, rulers)]
    every = [differences(runs), results(runs), costs(runs, price), *evaluated, locks]
    return [table for table in every if table.rows]


def rendered(table: Table) -> RichTable:
    """Return the table for a terminal, its best numbers in green."""
    rows = [
        [Text(cell, "bold green" if (row, column) in table.best else "") for column, cell in cells]
        for row, cells in enumerate(map(enumerate, table.rows))
    ]
    return text_table(table.title, table.headings, rows)


def differing(runs: list[Run]) -> list[str]:
    """Return the keys of the configurations whose values are not the same in all runs."""
    ignored = set(NOT_COMPARED)
    if runs[0].tokenizer and len({run.tokenizer for run in runs}) == 1:
        ignored.add("data.tokenizer")
    return [
        key
        for key in dict.fromkeys(key for run in runs for key in run.config)
        if key not in ignored
        # init= decides the whole config.json that transformers reads
        and not key.startswith("model.transformers.")
        and len({compared(run, key) for run in runs}) > 1
        and not (key in FOLLOWS and follows(runs, key, FOLLOWS[key]))
        and not (key in DEFAULTS and all(has_default(run, key) for run in runs))
        and not (key == "val_rows" and len(set(map(validated, runs))) == 1)
    ]


def follows(runs: list[Run], key: str, leader: str) -> bool:
    """Return True if `leader` differs and runs with one value of it have one value of `key`."""
    pairs = {(compared(run, leader), compared(run, key)) for run in runs}
    return 1 < len(dict(pairs)) == len(pairs)


def has_default(run: Run, key: str) -> bool:
    """Return True if `key` has its default by the leading key."""
    leader, default = DEFAULTS[key]
    return leader in run.config and run.config[key] == default(run.config[leader])


def validated(run: Run) -> str:
    """Return the tokens of a validation, "0" for all; "" if a run does not know them."""
    rows, length = run.config.get("val_rows"), run.config.get("seq_len")
    return str(rows * length) if isinstance(rows, int) and isinstance(length, int) else ""


def compared(run: Run, key: str) -> str:
    """Write a value of the configuration, an absolute path by its name alone."""
    value = run.config.get(key)
    if isinstance(value, list):
        return str([Path(item).name if str(item).startswith("/") else item for item in value])
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name
    return configured(run, key)


def configured(run: Run, key: str) -> str:
    """Write a value of the configuration as it is given; a dash if the run has no such key."""
    return fields.shown(run.config[key]) if key in run.config else "–"


def pivot(
    title: str, headings: list[str], rows: Sequence[Pivoted], best: Collection[tuple[int, Any]] = ()
) -> Table:
    """Return a table of (cells of `headings`, cells by column): every column in which a row has
    text, lengths in ascending order. `best` are rows and columns.
    """
    known = dict.fromkeys(column for _, cells in rows for column in cells)
    columns = [column for column in known if any(cells.get(column) for _, cells in rows)]
    if all(isinstance(column, int) for column in columns):
        columns.sort()
    titles = [f"{column:,}" if isinstance(column, int) else column for column in columns]
    filled = [[*names, *(cells.get(column, "") for column in columns)] for names, cells in rows]
    keys = len(headings)
    marked = {(row, keys + columns.index(column)) for row, column in best if column in columns}
    return Table(title, headings + titles, filled, marked, keys)


def differences(runs: list[Run]) -> Table:
    """Return a column for each key of the configuration that differs."""
    keys = differing(runs)
    rows = [([run.label], {key: compared(run, key) for key in keys}) for run in runs if keys]
    return pivot("what differs", ["run"], rows)


def not_ranked(runs: list[Run]) -> list[str]:
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


def documents_of(run: Run) -> dict[str, str]:
    """Return the keys that decide the documents of a run, their tokens, and their loss.

    The hash of the run's tokenizer, if it has one, replaces the keys that tell its origin.
    """
    # z_loss is no part of the loss that is logged
    without = {"data.cache", "objective.z_loss"}
    decisive = "data.", "objective."
    keys = [key for key in run.config if key.startswith(decisive) and key not in without]
    # KTO's baseline is a mean over a micro-batch on all devices, in a validation too
    if run.config.get("objective.name") == "kto":
        keys += ["batch_size", "devices", "context.degree"]
    values = {key: configured(run, key) for key in (*keys, "model.vocab_size")}
    values["val_rows"] = validated(run)
    if not run.tokenizer:
        return values
    return values | {"data.tokenizer": run.tokenizer, "data.vocab_size": ""}


def results(runs: list[Run]) -> Table:
    """Return a column for each figure of any run; the best is marked if they can be compared."""
    same_documents = not not_ranked(runs)
    rows = [([run.label], dict[str, str]()) for run in runs]
    best = set[tuple[int, str]]()
    for metric in shown(Shown.COMPARE):
        key = metric.key
        cells = [metric.format(run.figures[key]) if key in run.figures else "" for run in runs]
        if same_documents or not is_loss(metric):
            best |= {(row, metric.heading) for row in best_of(metric, runs, cells)}
        for run, cell, (_, by_column) in zip(runs, cells, rows, strict=True):
            error = error_of(run.figures) if key == "val_perplexity" else ""
            by_column[metric.heading] = cell + error
    for run, (_, by_column) in zip(runs, rows, strict=True):
        by_column |= {"context trained at": longest_context(run), "ended": run.ended}
    return pivot("what came out", ["run"], rows, best)


def error_of(figures: Row) -> str:
    """Write the standard error of a run's validation perplexity, if it is known."""
    numbers = finite(figures.get(key) for key in ("val_perplexity", "val_loss_error"))
    return f" ± {numbers[0] * numbers[1]:,.2f}" if len(numbers) == 2 else ""


def costs(runs: list[Run], price: float | None) -> Table:
    """Return the hardware, the kernel, the time and the cost of each run."""
    tokens = "tokens for 1 of its currency"
    rows: list[Pivoted] = []
    for run in runs:
        cost = run.cost
        cells = {
            "hardware": cost.hardware,
            "attention": str(run.config.get("attention.backend", "")),
            "kernel": run.lock.get("kernel", ""),
            "fingerprint": run.lock.get("fingerprint", ""),
            "time": "" if cost.seconds is None else duration(cost.seconds),
            "GPU hours": written("{:,.2f}", cost.gpu_hours),
            f"cost at {price} an hour": written("{:,.2f}", cost.money),
            tokens: written("{:,.0f}", cost.tokens_per_money),
        }
        rows.append(([run.label], cells))
    rates = [run.cost.tokens_per_money or 0.0 for run in runs]
    best = [(rates.index(max(rates)), tokens)] if len(runs) > 1 else []
    return pivot("what it cost", ["run"], rows, best)


def written(form: str, value: float | None) -> str:
    """Write a number; an empty cell for None."""
    return "" if value is None else form.format(value)


def longest_context(run: Run) -> str:
    """Return the context that the run trained at, and the context of eval.py if it is longer."""
    trained = run.config.get("seq_len")
    if not isinstance(trained, int):
        return ""
    longest = max((score["context"] for score in run.evaluations.perplexities), default=0)
    return f"{trained:,}" + (f", evaluated at {longest:,}" if longest > trained else "")


def best_of(metric: Metric, runs: list[Run], cells: list[str]) -> list[int]:
    """Return the numbers of the runs that did best; none if more than half share the figure."""
    values = finite(run.figures[metric.key] for run in runs if metric.key in run.figures)
    if metric.better is None or not values:
        return []
    best = metric.format(min(values) if metric.better == "min" else max(values))
    winners = [number for number, cell in enumerate(cells) if cell == best]
    return winners if 2 * len(winners) <= sum(map(bool, cells)) else []


def evaluations(runs: list[Run]) -> Table:
    """Return the perplexities of eval.py."""
    headings = ["run", "evaluation", "context", "stride", "tokens"]
    headings += ["perplexity", "word perplexity", "bits per byte"]
    formats = {"perplexity": "{:,.3f}", "word_perplexity": "{:,.4g}", "bits_per_byte": "{:.4f}"}
    rows = []
    for run in runs:
        for score in run.evaluations.perplexities:
            counts = [f"{score[key]:,}" for key in ("context", "stride", "tokens")]
            numbers = [written(form, score[key]) for key, form in formats.items()]
            if score["perplexity"] is not None and score["standard_error"]:
                numbers[0] += f" ± {score['perplexity'] * score['standard_error']:,.3f}"
            rows.append([run.label, score["file"], *counts, *numbers])
    return Table("evaluations", headings, rows, best_bits(runs, len(headings) - 1), keys=2)


def best_bits(runs: list[Run], column: int) -> set[tuple[int, int]]:
    """Return the cell of the least bits per byte among evaluations of the same number of bytes, if
    they are of several runs.
    """
    scores = [(run.label, score) for run in runs for score in run.evaluations.perplexities]
    by_bytes: dict[int, list[tuple[float, int, str]]] = {}
    for row, (label, score) in enumerate(scores):
        if score["bytes"] and score["bits_per_byte"] is not None:
            by_bytes.setdefault(score["bytes"], []).append((score["bits_per_byte"], row, label))
    groups = [group for group in by_bytes.values() if len({label for *_, label in group}) > 1]
    return {(min(group)[1], column) for group in groups}


def tasks(runs: list[Run]) -> Table:
    """Return the scores of lm-evaluation-harness, a column for each task and metric."""
    rows: list[Pivoted] = []
    for run in runs:
        by_context: dict[int, dict[str, str]] = {}
        for score in run.evaluations.tasks:
            cell = f"{score['value']:,.4f}" + written(" ± {:,.4f}", score["error"])
            column = f"{score['task']} {score['metric']}"
            by_context.setdefault(score["context"], {})[column] = cell
        rows += [([run.label, f"{context:,}"], cells) for context, cells in by_context.items()]
    return pivot("tasks", ["run", "context"], rows)


def passkeys(runs: list[Run]) -> Table:
    """Return the share of pass keys that the last validation and eval.py found over all depths, for
    each length.
    """
    rows: list[Pivoted] = []
    for run in runs:
        for kind, by_length in run.facts.items():
            cells = {length: f"{share:.0%}" for length, share in by_length.items()}
            rows.append(([run.label, "last validation", kind], cells))
        for grid in run.evaluations.passkeys:
            by_depth = zip(grid["lengths"], grid["accuracy"], strict=True)
            cells = {length: f"{fmean(shares):.0%}" for length, shares in by_depth}
            rows.append(([run.label, grid["file"], grid["kind"]], cells))
    return pivot("facts found again", ["run", "evaluation", "kind"], rows)


def rulers(runs: list[Run]) -> Table:
    """Return RULER's scores in percent, a row for each run and task, a column for each length."""
    rows: list[Pivoted] = []
    for run in runs:
        for ruler in run.evaluations.rulers:
            for task, scores in ruler["scores"].items():
                shares = zip(ruler["lengths"], scores, strict=True)
                cells = {length: f"{100 * share:.1f}" for length, share in shares}
                rows.append(([run.label, ruler["file"], task], cells))
    return pivot("RULER (%)", ["run", "evaluation", "task"], rows)


def lock_differences(runs: list[Run]) -> list[str]:
    """Return a warning for each field in which kernel locks of one backend differ."""
    # Fingerprints depend on the shape of the model, the precision and the length
    model = (f"model.{key}" for key in ("channels", "heads", "kv_heads", "head_dim"))
    shape = ("seq_len", "precision", *model)
    # (backend, field, shape) → value → the runs that have it
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for key in dict.fromkeys(key for run in runs for key in run.lock):
        for run in runs:
            if run.lock:
                compared = shape if key == "fingerprint" else ()
                same = [configured(run, name) for name in ("attention.backend", *compared)]
                values = groups.setdefault((key, *same), {})
                values.setdefault(run.lock.get(key, "none"), []).append(run.label)
    warnings = []
    for (key, backend, *_), values in groups.items():
        if len(values) > 1:
            text = "; ".join(f"{value} ({', '.join(names)})" for value, names in values.items())
            warnings.append(f"warning: kernel locks of {backend} differ in {key}: {text}")
    return warnings


def write_page(out: Path, runs: list[Run], tables: list[Table], notes: list[str]) -> None:
    """Write the page to `out` atomically."""
    data = {
        "curves": headings(Shown.CURVE),
        # Their first values are so large that later differences would not show
        "late": [metric.key for metric in shown(Shown.CURVE) if is_loss(metric)],
        "lengths": headings(Shown.CONTEXT),
        "runs": [described(run) for run in runs],
        "tables": [table._asdict() | {"best": sorted(table.best)} for table in tables],
        "notes": notes,
    }
    template = (resources.files("longctx.report") / "page.html").read_text(encoding="utf-8")
    files.write_for_key("out", out, template.replace("DATA_AS_JSON", embedded(data), 1))


def headings(view: Shown) -> dict[str, str]:
    """Return key and title of each metric that is drawn in `view`."""
    return {metric.key: metric.heading for metric in shown(view)}


def described(run: Run) -> dict[str, Any]:
    """Return the data that the page draws of a run."""
    # Of the run's own documents that validate: the newest checkpoint, in its longest context
    scores = [score for score in run.evaluations.perplexities if score["file"].startswith("val-")]
    scores.sort(key=lambda score: (STEP.findall(score["file"]), score["context"]), reverse=True)
    evaluated = next((score["positions"] for score in scores if score["positions"]["x"]), None)
    return {
        "label": run.label,
        "backend": str(run.config.get("attention.backend", "")),
        "seq_len": run.config.get("seq_len"),
        "figures": {
            key: run.figures[key]
            for key in headings(Shown.CONTEXT)
            if key in run.figures and finite([run.figures[key]])
        },
        "curves": run.curves,
        "warm": run.warm,
        "positions": run.positions or evaluated,
        "contexts": next((score["contexts"] for score in scores if score["contexts"]["x"]), None),
        "split": split(run.figures),
        "passkeys": run.evaluations.passkeys,
        "rulers": run.evaluations.rulers,
    }


def split(figures: Row) -> dict[str, float]:
    """Return the milliseconds of each part of a step, {} if the rows do not have them."""
    if "forward_ms" not in figures or "ms_per_step" not in figures:
        return {}
    parts = {
        metric.label: figures[metric.key]
        for metric in METRICS
        if metric.panel == STEP_PARTS and metric.key in figures
    }
    parts["rest"] = max(0.0, figures["ms_per_step"] - sum(parts.values()))
    return {label: float(f"{value:.4g}") for label, value in parts.items()}


def embedded(data: Any) -> str:
    """Return JSON that can be in a script element: without `<`, `>` and `&`, and in ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def is_loss(metric: Metric) -> bool:
    """Return True for a loss, which can only be compared over the same documents."""
    return metric.better == "min" and metric.panel is not None and metric.panel.section == "Loss"
