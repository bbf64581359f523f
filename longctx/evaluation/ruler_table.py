"""Scores of RULER over tasks and lengths as a table, as JSON, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from longctx.evaluation.plots import heat_map, save
from longctx.evaluation.ruler import TASKS
from longctx.runs.evaluations import ruler_rows
from longctx.tables import show as show_table


def content(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON's lengths, mean scores of each task at each length, and answers."""
    points: dict[str, dict[int, list[float]]] = {}
    for row in answers:
        points.setdefault(row["task"], {}).setdefault(row["length"], []).append(row["score"])
    lengths = sorted({row["length"] for row in answers})
    scores = {
        task: [round(fmean(by_length[length]), 6) for length in lengths]
        for task, by_length in points.items()
    }
    return {"ruler": {"lengths": lengths, "scores": scores}, "answers": list(answers)}


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
    if any(TASKS[task].essay for task in content["ruler"]["scores"]):
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
