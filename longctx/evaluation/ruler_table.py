"""Scores of RULER over tasks and lengths as a table, as JSON, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from longctx.evaluation.plots import heat_map, save
from longctx.evaluation.ruler import Scored
from longctx.evaluation.ruler_texts import needs_essay
from longctx.runs.evaluations import ruler_rows
from longctx.tables import show as show_table


def content(scored: Sequence[Scored]) -> dict[str, Any]:
    """What the JSON says: lengths, the mean score of each task at each of them, every answer."""
    lengths = sorted({one.length for one in scored})
    scores = {}
    for task in dict.fromkeys(one.task for one in scored):
        of_task = [one for one in scored if one.task == task]
        scores[task] = [
            round(fmean(one.score for one in of_task if one.length == length), 6)
            for length in lengths
        ]
    return {
        "ruler": {"lengths": lengths, "scores": scores},
        "answers": [one._asdict() for one in scored],
    }


def show(content: dict[str, Any]) -> None:
    """Print the table: tasks down, lengths across, the score in percent."""
    lengths, rows = ruler_rows(content)
    view = Table(title="RULER, score by task and tokens (%)", title_justify="left")
    view.add_column("task")
    for length in lengths:
        view.add_column(f"{length:,}", justify="right")
    for name, scores in rows.items():
        if name == "mean":
            view.add_section()
        style = "bold" if name == "mean" else None
        view.add_row(name, *(f"{100 * score:.1f}" for score in scores), style=style)
    show_table(view)
    for line in notes(content):
        print(line)


def notes(content: dict[str, Any]) -> list[str]:
    """What is not RULER's own data."""
    lines = []
    if any(map(needs_essay, content["ruler"]["scores"])):
        lines.append("essays are your own text, where RULER has Paul Graham's")
    if tasks := content["made"]:
        lines.append(f"{' and '.join(tasks)}: questions made from your own text, not RULER's data")
    return lines


def draw(content: dict[str, Any], path: Path) -> None:
    """Write a PNG of the table in the content of a JSON."""
    lengths, rows = ruler_rows(content)
    size = 3.2 + 0.8 * len(lengths), 1.5 + 0.28 * len(rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    heat_map(axes, list(rows.values()), lengths, list(rows))
    axes.set(xlabel="tokens", title="RULER, score (%)")
    save(figure, path)
