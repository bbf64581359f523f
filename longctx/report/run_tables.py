"""The tables of a comparison: what differs between runs, and what came out of each."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from rich.table import Table as RichTable
from rich.text import Text

from longctx.report.run_view import Run
from longctx.runs.metrics import Metric, Shown, finite, shown

NOT_COMPARED = {"name", "runs", "resume"}  # where a run is, not what it does


class Table(NamedTuple):
    """Cells as text, a run's label first; `best` are the (row, column) of each column's best
    number.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]]
    keys: int = 1  # columns that name a row


def tables(runs: list[Run]) -> list[Table]:
    """Every table that has something to show."""
    every = [
        differences(runs),
        results(runs),
        evaluations(runs),
        tasks(runs),
        passkeys(runs),
        rulers(runs),
        kernel_locks(runs),
    ]
    return [table for table in every if table.rows]


def differing(runs: list[Run]) -> list[str]:
    """The keys of the configurations whose values are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in NOT_COMPARED)
    return [key for key in keys if len({configured(run, key) for run in runs}) > 1]


def configured(run: Run, key: str) -> str:
    """A value of the configuration as YAML writes it; a dash where the run has no such key."""
    if key not in run.config:
        return "–"
    value = run.config[key]
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def differences(runs: list[Run]) -> Table:
    """One column for each key of the configuration that differs."""
    keys = differing(runs)
    rows = [[run.label, *(configured(run, key) for key in keys)] for run in runs] if keys else []
    return Table("what differs", ["run", *keys], rows, set())


def documents_of(run: Run) -> dict[str, str]:
    """The keys that decide which documents a run has, and its tokens; the hash of its tokenizer,
    where it has one, for those that say where that came from.
    """
    keys = [key for key in run.config if key.startswith("data.") and key != "data.cache"]
    values = {key: configured(run, key) for key in (*keys, "model.vocab_size")}
    if not run.tokenizer:
        return values
    return values | {"data.tokenizer": run.tokenizer, "data.vocab_size": ""}


def not_ranked(runs: list[Run]) -> list[str]:
    """A note where losses stand side by side that cannot be compared."""
    first, *others = map(documents_of, runs)
    keys = {key for other in others for key in first | other if first.get(key) != other.get(key)}
    if not keys:
        return []
    return [
        f"losses are not ranked: they are of other documents or tokens ({', '.join(sorted(keys))} "
        "differ); across tokenizers compare the bits per byte of eval.py on the same documents"
    ]


def is_loss(metric: Metric) -> bool:
    """Whether a metric depends on the documents and their tokens."""
    return metric.panel is not None and metric.panel.section == "Loss"


def results(runs: list[Run]) -> Table:
    """One column for each figure of any run; the best is marked where they can be compared."""
    same = not not_ranked(runs)
    table = Table("what came out", ["run"], [[run.label] for run in runs], set())
    for metric in shown(Shown.COMPARE):
        cells = [
            metric.format(run.figures[metric.key]) if metric.key in run.figures else ""
            for run in runs
        ]
        if any(cells):
            if same or not is_loss(metric):
                table.best.update(
                    (row, len(table.headings)) for row in best_of(metric, runs, cells)
                )
            add_column(table, metric.heading, cells)
    if any(run.longest for run in runs):
        add_column(table, "context trained at", [run.longest for run in runs])
    add_column(table, "ended", [run.ended for run in runs])
    return table


def add_column(table: Table, heading: str, cells: list[str]) -> None:
    """Append a cell to every row."""
    table.headings.append(heading)
    for row, cell in zip(table.rows, cells, strict=True):
        row.append(cell)


def best_of(metric: Metric, runs: list[Run], cells: list[str]) -> list[int]:
    """The numbers of the runs that did best; none where most of them share the best figure."""
    values = finite(run.figures[metric.key] for run in runs if metric.key in run.figures)
    if metric.better is None or not values:
        return []
    best = metric.format(min(values) if metric.better == "min" else max(values))
    winners = [number for number, cell in enumerate(cells) if cell == best]
    return winners if 2 * len(winners) <= sum(map(bool, cells)) else []


def evaluations(runs: list[Run]) -> Table:
    """The perplexities of eval.py."""
    headings = [
        "run",
        "evaluation",
        "context",
        "stride",
        "tokens",
        "perplexity",
        "word perplexity",
        "bits per byte",
    ]
    formats = {"perplexity": "{:,.3f}", "word_perplexity": "{:,.4g}", "bits_per_byte": "{:.4f}"}
    rows = []
    for run in runs:
        for score in run.evaluations.perplexities:
            counts = [f"{score[key]:,}" for key in ("context", "stride", "tokens")]
            numbers = [
                "" if score[key] is None else text.format(score[key])
                for key, text in formats.items()
            ]
            if score["perplexity"] is not None and score.get("standard_error"):
                numbers[0] += f" ± {score['perplexity'] * score['standard_error']:,.3f}"
            rows.append([run.label, score["file"], *counts, *numbers])
    return Table("evaluations", headings, rows, best_bits(runs, len(headings) - 1), keys=2)


def best_bits(runs: list[Run], column: int) -> set[tuple[int, int]]:
    """The least bits per byte among evaluations of the same number of bytes, in several runs."""
    scores = [(run.label, score) for run in runs for score in run.evaluations.perplexities]
    by_bytes: dict[int, list[tuple[float, int, str]]] = {}
    for row, (label, score) in enumerate(scores):
        if score["bytes"] and score["bits_per_byte"] is not None:
            by_bytes.setdefault(score["bytes"], []).append((score["bits_per_byte"], row, label))
    several = [each for each in by_bytes.values() if len({label for *_, label in each}) > 1]
    return {(min(each)[1], column) for each in several}


def tasks(runs: list[Run]) -> Table:
    """Scores of lm-evaluation-harness, a column for each task and metric."""
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
    """Facts found again, by the last validation and by eval.py: the share over all depths, for each
    length.
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
    """RULER's scores in percent, a row for each run and task, a column for each length."""
    scores = [
        (run.label, one["file"], task, dict(zip(one["lengths"], of_task, strict=True)))
        for run in runs
        for one in run.evaluations.rulers
        for task, of_task in one["scores"].items()
    ]
    return _by_length("RULER (%)", "task", scores, lambda share: f"{100 * share:.1f}")


def _by_length(
    title: str,
    what: str,
    scores: list[tuple[str, str, str, dict[int, float]]],
    written: Callable[[float], str],
) -> Table:
    """A row for each (run, evaluation, `what`, score by length), a column for each length."""
    lengths = sorted({length for *_, by_length in scores for length in by_length})
    rows = [
        [*names, *(written(by_length[n]) if n in by_length else "" for n in lengths)]
        for *names, by_length in scores
    ]
    headings = ["run", "evaluation", what, *(f"{length:,}" for length in lengths)]
    return Table(title, headings, rows, set(), keys=3)


def kernel_locks(runs: list[Run]) -> Table:
    """The kernels that ran, of the runs that recorded them."""
    keys = list(dict.fromkeys(key for run in runs for key in run.lock))
    rows = [[run.label, *(run.lock.get(key, "") for key in keys)] for run in runs if run.lock]
    return Table("kernel locks", ["run", *keys], rows, set())


def rendered(table: Table) -> RichTable:
    """The table for a terminal."""
    view = RichTable(
        title=table.title, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for column, heading in enumerate(table.headings):
        numeric = column > 0 and all(
            row[column][:1].isdigit() or not row[column] for row in table.rows
        )
        view.add_column(Text(heading), justify="right" if numeric else "left")
    for number, row in enumerate(table.rows):
        cells = [
            Text(cell, "bold green" if (number, column) in table.best else "")
            for column, cell in enumerate(row)
        ]
        view.add_row(*cells)
    return view
