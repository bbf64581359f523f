"""Several runs next to each other: tables on the terminal, and a page with their curves.

The page is page.html with the data as JSON in it. It needs no network and no library. Anybody can
name a run: no letter of the data can end the script element that holds them, and the page makes
text nodes of them, never HTML.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.table import Table as RichTable
from rich.text import Text

from longctx import files
from longctx.report.run_view import Run, read
from longctx.runs.metrics import METRICS, STEP_PARTS, Metric, Row, Shown, finite, shown
from longctx.tables import console, show

# Points in all curves of a page together: 7 MB.
POINTS = 250_000
# Keys for the place of a run, which change nothing of its results.
NOT_COMPARED = {"name", "runs", "resume"}


class Table(NamedTuple):
    """Cells as text, a run's label first; `best` are the (row, column) of each column's best
    number.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]]
    keys: int = 1  # columns that name a row


def compare(paths: Sequence[Path], out: Path) -> None:
    """Print the tables of the runs at `paths` and write their page to `out`.

    A folder that is no run is left out, and a note on stderr says so. Raises ValueError or OSError,
    one line, if no run is left.
    """
    runs, notes = read_all(paths)
    tables = all_tables(runs)
    # Before anything is printed: a mistake in `out` is one line.
    write_page(out, runs, tables, notes)
    for table in tables:
        show(rendered(table), table.keys)
        print()
    for note in notes:
        line = note if note.startswith("warning: ") else f"note: {note}"
        console(stderr=True).print(line, soft_wrap=True)
    console().print(f"curves     {out}", soft_wrap=True)


def read_all(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
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
            runs.append(read(path, points))
        except ValueError as problem:
            problems.append(problem)
    if not runs:
        raise problems[0]
    # Runs in different folders can have the same name.
    counts = Counter(run.label for run in runs)
    for run in runs:
        if counts[run.label] > 1:
            run.label = str(run.folder)
    notes = [note for run in runs for note in run.notes]
    notes += [*not_ranked(runs), *lock_differences(runs)]
    return runs, [*notes, *(f"left out: {problem}" for problem in problems)]


def all_tables(runs: list[Run]) -> list[Table]:
    """Return every table that has something to show."""
    every = (differences, results, evaluations, tasks, passkeys, rulers, kernel_locks)
    return [table for make in every if (table := make(runs)).rows]


def rendered(table: Table) -> RichTable:
    """Return the table for a terminal."""
    view = RichTable(
        title=table.title, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for column, heading in enumerate(table.headings):
        cells = [row[column] for row in table.rows]
        numeric = column > 0 and all(cell[:1].isdigit() or not cell for cell in cells)
        view.add_column(Text(heading), justify="right" if numeric else "left")
    for number, row in enumerate(table.rows):
        styles = ("bold green" if (number, n) in table.best else "" for n in range(len(row)))
        view.add_row(*map(Text, row, styles))
    return view


def differing(runs: list[Run]) -> list[str]:
    """Return the keys of the configurations whose values are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in NOT_COMPARED)
    return [key for key in keys if len({configured(run, key) for run in runs}) > 1]


def configured(run: Run, key: str) -> str:
    """Write a value of the configuration as YAML does; a dash if the run has no such key."""
    if key not in run.config:
        return "–"
    value = run.config[key]
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def differences(runs: list[Run]) -> Table:
    """Return a column for each key of the configuration that differs."""
    keys = differing(runs)
    rows = [[run.label, *(configured(run, key) for key in keys)] for run in runs] if keys else []
    return Table("what differs", ["run", *keys], rows, set())


def not_ranked(runs: list[Run]) -> list[str]:
    """Return a note if the losses of the runs cannot be compared."""
    first, *others = map(documents_of, runs)
    keys = {key for other in others for key in first | other if first.get(key) != other.get(key)}
    if not keys:
        return []
    return [
        f"losses are not ranked: they are of other documents or tokens ({', '.join(sorted(keys))} "
        "differ); across tokenizers compare the bits per byte of eval.py on the same documents"
    ]


def documents_of(run: Run) -> dict[str, str]:
    """Return the keys that decide the documents of a run and their tokens.

    The hash of the run's tokenizer, if it has one, replaces the keys that tell its origin.
    """
    keys = [key for key in run.config if key.startswith("data.") and key != "data.cache"]
    values = {key: configured(run, key) for key in (*keys, "model.vocab_size")}
    if not run.tokenizer:
        return values
    return values | {"data.tokenizer": run.tokenizer, "data.vocab_size": ""}


def results(runs: list[Run]) -> Table:
    """Return a column for each figure of any run; the best is marked if they can be compared."""
    same_documents = not not_ranked(runs)
    columns = {"run": [run.label for run in runs]}
    best: set[tuple[int, int]] = set()
    for metric in shown(Shown.COMPARE):
        key = metric.key
        cells = [metric.format(run.figures[key]) if key in run.figures else "" for run in runs]
        is_loss = metric.panel is not None and metric.panel.section == "Loss"
        if any(cells):
            if same_documents or not is_loss:
                best |= {(row, len(columns)) for row in best_of(metric, runs, cells)}
            columns[metric.heading] = cells
    contexts = [longest_context(run) for run in runs]
    if any(contexts):
        columns["context trained at"] = contexts
    columns["ended"] = [run.ended for run in runs]
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table("what came out", list(columns), rows, best)


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
            numbers = [
                "" if score[key] is None else text.format(score[key])
                for key, text in formats.items()
            ]
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
    several = [each for each in by_bytes.values() if len({label for *_, label in each}) > 1]
    return {(min(each)[1], column) for each in several}


def tasks(runs: list[Run]) -> Table:
    """Return the scores of lm-evaluation-harness, a column for each task and metric."""
    names = list(dict.fromkeys(score["name"] for run in runs for score in run.evaluations.tasks))
    rows = []
    for run in runs:
        by_context: dict[int, dict[str, str]] = {}
        for score in run.evaluations.tasks:
            by_context.setdefault(score["context"], {})[score["name"]] = f"{score['value']:,.4f}"
        for context, cells in by_context.items():
            rows.append([run.label, f"{context:,}", *(cells.get(name, "") for name in names)])
    return Table("tasks", ["run", "context", *names], rows, set(), keys=2)


def passkeys(runs: list[Run]) -> Table:
    """Return the share of pass keys that the last validation and eval.py found over all depths, for
    each length.
    """
    shares: list[tuple[str, str, str, dict[int, float]]] = []
    for run in runs:
        for kind, by_length in run.facts.items():
            shares.append((run.label, "last validation", kind, by_length))
        for grid in run.evaluations.passkeys:
            means = dict(zip(grid["lengths"], map(fmean, grid["accuracy"]), strict=True))
            shares.append((run.label, grid["file"], grid["kind"], means))
    return _by_length("facts found again", "kind", shares, "{:.0%}".format)


def rulers(runs: list[Run]) -> Table:
    """Return RULER's scores in percent, a row for each run and task, a column for each length."""
    scores = [
        (run.label, ruler["file"], task, dict(zip(ruler["lengths"], of_task, strict=True)))
        for run in runs
        for ruler in run.evaluations.rulers
        for task, of_task in ruler["scores"].items()
    ]
    return _by_length("RULER (%)", "task", scores, lambda share: f"{100 * share:.1f}")


def _by_length(
    title: str,
    what: str,
    scores: list[tuple[str, str, str, dict[int, float]]],
    written: Callable[[float], str],
) -> Table:
    """Return a row for each (run, evaluation, `what`, scores), a column for each length."""
    lengths = sorted({length for *_, by_length in scores for length in by_length})
    rows = [
        [*names, *(written(by_length[n]) if n in by_length else "" for n in lengths)]
        for *names, by_length in scores
    ]
    headings = ["run", "evaluation", what, *(f"{length:,}" for length in lengths)]
    return Table(title, headings, rows, set(), keys=3)


def kernel_locks(runs: list[Run]) -> Table:
    """Return the kernels of the runs that recorded them."""
    keys = list(dict.fromkeys(key for run in runs for key in run.lock))
    rows = [[run.label, *(run.lock.get(key, "") for key in keys)] for run in runs if run.lock]
    return Table("kernel locks", ["run", *keys], rows, set())


def lock_differences(runs: list[Run]) -> list[str]:
    """Return a warning for each field in which kernel locks of one backend differ."""
    # Fingerprints depend on the shape of the model, the precision and the length.
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
            text = "; ".join(f"{value} ({_names(labels)})" for value, labels in values.items())
            warnings.append(f"warning: kernel locks of {backend} differ in {key}: {text}")
    return warnings


def _names(labels: list[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def write_page(out: Path, runs: list[Run], tables: list[Table], notes: list[str]) -> None:
    """Write the page to `out` atomically."""
    data = {
        "curves": headings(Shown.CURVE),
        "lengths": headings(Shown.CONTEXT),
        "runs": [described(run) for run in runs],
        "tables": [table._asdict() | {"best": sorted(table.best)} for table in tables],
        "notes": notes,
    }
    template = (resources.files("longctx.report") / "page.html").read_text(encoding="utf-8")
    try:
        files.write_text(out, template.replace("DATA_AS_JSON", embedded(data), 1))
    except OSError as error:
        raise OSError(f"out={out}: cannot be written: {error.strerror}") from error


def headings(place: Shown) -> dict[str, str]:
    """Return key and title of each metric that is drawn in `place`."""
    return {metric.key: metric.heading for metric in shown(place)}


def described(run: Run) -> dict[str, Any]:
    """Return the data that the page draws of a run."""
    scores = run.evaluations.perplexities
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
