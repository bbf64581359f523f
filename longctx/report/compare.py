"""Several runs side by side: tables on the terminal, and a page with their curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from longctx.report import page
from longctx.report.locks import lock_differences
from longctx.report.run_tables import not_ranked, rendered, tables
from longctx.report.run_view import Run, read
from longctx.runs.metrics import Shown, shown
from longctx.runs.run_folder import NotARun
from longctx.tables import console, show

POINTS = 250_000  # in all curves of a page, which makes it 7 MB


def compare(paths: Sequence[Path], out: Path) -> None:
    """Print the tables of the runs at `paths` and write their page to `out`.

    What is no run is left out, and a note on stderr says so. Raises ValueError or OSError, one
    line, where no run is left.
    """
    page.check(out)
    runs, notes = read_all(paths)
    shown_tables = tables(runs)
    page.write(out, runs, shown_tables, notes)
    for table in shown_tables:
        show(rendered(table), table.keys)
        print()
    for note in notes:
        line = note if note.startswith("warning: ") else f"note: {note}"
        console(stderr=True).print(line, soft_wrap=True)
    console().print(f"curves     {out}", soft_wrap=True)


def read_all(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs at `paths`, each once, and notes on them; raises the first problem where no run is
    left.
    """
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
    points = min(2000, max(60, POINTS // (len(unique) * len(shown(Shown.CURVE)))))
    runs: list[Run] = []
    problems: list[NotARun] = []
    for path in unique.values():
        try:
            runs.append(read(path, points))
        except NotARun as problem:
            problems.append(problem)
    if not runs:
        raise problems[0]
    counts = Counter(run.label for run in runs)
    for run in runs:
        if counts[run.label] > 1:
            run.label = str(run.folder)
    notes = [note for run in runs for note in run.notes]
    notes += not_ranked(runs)
    notes += lock_differences((run.label, run.config, run.lock) for run in runs)
    return runs, [*notes, *(f"left out: {problem}" for problem in problems)]
