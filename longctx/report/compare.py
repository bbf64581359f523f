"""Several runs side by side: what differs between their configurations, what came out, and a page
with their curves.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from longctx.report import page
from longctx.report.findings import lock_differences
from longctx.report.runs import CURVES, NotARun, Run, finite, printable, read

POINTS = 250_000  # in all curves of a page, which makes it 7 MB
NOT_COMPARED = {"name", "runs", "resume"}  # they say where a run is, not what it does


class Table(NamedTuple):
    """Cells as text, a run's label first; `best` are the (row, column) of each column's best
    number.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]]


def compare(paths: Sequence[Path], out: Path) -> None:
    """Print the tables of the runs at `paths` and write their page to `out`.

    What is no run is left out and said; raises ValueError or OSError, one line, where no run is
    left.
    """
    page.check(out)
    runs, notes = read_all(paths)
    tables = [
        make(runs) for make in (differences, results, evaluations, tasks, passkeys, kernel_locks)
    ]
    tables = [table for table in tables if table.rows]
    page.write(out, runs, tables, notes)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240
    for table in tables:
        console.print(rendered(table))
        console.print()
    for note in notes:
        print(note if note.startswith("warning: ") else f"note: {note}", file=sys.stderr)
    console.print(f"curves     {printable(str(out))}", markup=False, soft_wrap=True)


def read_all(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs at `paths`, each once, and what to know about them."""
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(path.resolve(), path)
    most = min(2000, max(60, POINTS // (len(once) * len(CURVES))))
    runs: list[Run] = []
    problems: list[NotARun] = []
    for path in once.values():
        try:
            runs.append(read(path, most))
        except NotARun as problem:
            problems.append(problem)
    if not runs:
        raise problems[0]
    for label, count in Counter(run.label for run in runs).items():
        for run in runs if count > 1 else []:
            if run.label == label:
                run.label = printable(str(run.folder))
    notes = [note for run in runs for note in run.notes]
    notes += lock_differences((run.label, run.config, run.lock) for run in runs)
    return runs, [*notes, *(f"left out: {printable(str(problem))}" for problem in problems)]


def differing(runs: list[Run]) -> list[str]:
    """The keys of the configurations whose values are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in NOT_COMPARED)
    return [key for key in keys if len({said(run, key) for run in runs}) > 1]


def said(run: Run, key: str) -> str:
    """A value of the configuration as YAML says it; a dash where the run has no such key."""
    if key not in run.config:
        return "–"
    value = run.config[key]
    named = {True: "true", False: "false", None: "null"}
    return named[value] if value is None or isinstance(value, bool) else printable(str(value))


def differences(runs: list[Run]) -> Table:
    """One column for each key that differs."""
    keys = differing(runs)
    rows = [[run.label, *(said(run, key) for key in keys)] for run in runs] if keys else []
    return Table("what differs", ["run", *keys], rows, set())


def results(runs: list[Run]) -> Table:
    """One column for each figure that any run has."""
    made = Table("what came out", ["run"], [[run.label] for run in runs], set())
    columns: list[tuple[str, str, Callable[[Any], str], Callable[..., Any] | None]] = [
        ("step", "steps", "{:,}".format, None),
        ("tokens_seen", "tokens", "{:,}".format, None),
        ("loss", "loss", "{:.4f}".format, min),
        ("val_perplexity", "val perplexity", "{:,.2f}".format, min),
        ("tokens_per_second", "tokens/s", "{:,.0f}".format, max),
        ("mfu", "MFU", "{:.1%}".format, max),
        ("memory_peak_gib", "peak GiB", "{:.2f}".format, min),
        ("memory_predicted_gib", "predicted GiB", "{:.2f}".format, None),
        ("process_peak_gib", "peak GiB of the process", "{:.2f}".format, min),
    ]
    for key, heading, text, best in columns:
        values = {number: run.figures[key] for number, run in enumerate(runs) if key in run.figures}
        if not values:
            continue
        shown = {number: text(value) for number, value in values.items()}
        made.headings.append(heading)
        for number, row in enumerate(made.rows):
            row.append(shown.get(number, ""))
        if best and len(set(shown.values())) > 1 and finite(values.values()):
            winner = text(best(finite(values.values())))
            winners = [n for n, cell in shown.items() if cell == winner]
            if 2 * len(winners) <= len(shown):  # what most share is no distinction
                made.best.update((n, len(made.headings) - 1) for n in winners)
    if any(run.longest for run in runs):
        made.headings.append("longest context")
        for row, run in zip(made.rows, runs, strict=True):
            row.append(f"{run.longest:,}" if run.longest else "")
    made.headings.append("ended")
    for row, run in zip(made.rows, runs, strict=True):
        row.append(run.ended)
    return made


def evaluations(runs: list[Run]) -> Table:
    """What eval.py found."""
    rows = []
    for run in runs:
        for found in run.evaluations:
            scores = [found[key] for key in ("perplexity", "word_perplexity", "bits_per_byte")]
            counts = [f"{found[key]:,}" for key in ("context", "stride", "tokens")]
            formats = ("{:,.3f}", "{:,.4g}", "{:.4f}")
            shown = [
                "" if x is None else text.format(x) for x, text in zip(scores, formats, strict=True)
            ]
            rows.append([run.label, found["file"], *counts, *shown])
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
    return Table("evaluations", headings, rows, set())


def tasks(runs: list[Run]) -> Table:
    """Scores of lm-evaluation-harness, a column for each task and metric."""
    names = list(dict.fromkeys(found["name"] for run in runs for found in run.tasks))
    rows = []
    for run in runs:
        for context in dict.fromkeys(found["context"] for found in run.tasks):
            values = {
                found["name"]: found["value"] for found in run.tasks if found["context"] == context
            }
            shown = [f"{values[name]:,.4f}" if name in values else "" for name in names]
            rows.append([run.label, f"{context:,}", *shown])
    return Table("tasks", ["run", "context", *names], rows, set())


def passkeys(runs: list[Run]) -> Table:
    """Facts found again, by the last validation and by eval.py: the share over all depths, for each
    length.
    """
    found: list[tuple[str, str, str, dict[int, float]]] = []
    for run in runs:
        found += [
            (run.label, "last validation", kind, shares) for kind, shares in run.facts.items()
        ]
        for grid in run.passkeys:
            means = dict(zip(grid["lengths"], map(fmean, grid["accuracy"]), strict=True))
            found.append((run.label, grid["file"], grid["kind"], means))
    lengths = sorted({length for *_, shares in found for length in shares})
    rows = [
        [*names, *(f"{shares[length]:.0%}" if length in shares else "" for length in lengths)]
        for *names, shares in found
    ]
    return Table(
        "facts found again",
        ["run", "evaluation", "kind", *(f"{n:,}" for n in lengths)],
        rows,
        set(),
    )


def kernel_locks(runs: list[Run]) -> Table:
    """What ran, side by side, of the runs that wrote it down."""
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
        view.add_column(Text(heading), justify="right" if numeric else "left", overflow="fold")
    for number, row in enumerate(table.rows):
        cells = [
            Text(cell, "bold green" if (number, n) in table.best else "")
            for n, cell in enumerate(row)
        ]
        view.add_row(*cells)
    return view
