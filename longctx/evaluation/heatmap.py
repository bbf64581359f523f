"""Recall over length and depth as a table, as JSON, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from longctx.evaluation.passkey import Cell
from longctx.evaluation.plots import heat_map, save
from longctx.tables import show as show_table


def show(cells: Sequence[Cell]) -> None:
    """Print a table of each kind: depths down, lengths across, the share of right answers."""
    for kind, (lengths, depths, grid) in _grids(cells).items():
        print(f"{kind}: right answers, by depth and tokens")
        view = Table()
        view.add_column("depth", justify="right")
        for length in lengths:
            view.add_column(f"{length:,}", justify="right")
        for depth in depths:
            shares = (f"{grid[length, depth].accuracy:.0%}" for length in lengths)
            view.add_row(f"{depth:.0%}", *shares)
        view.add_section()
        means = [[grid[length, depth].accuracy for depth in depths] for length in lengths]
        view.add_row("mean", *(f"{sum(each) / len(each):.0%}" for each in means), style="bold")
        show_table(view)


def content(cells: Sequence[Cell]) -> dict[str, Any]:
    """What the JSON says: for each kind lengths, depths, and accuracy and logprob as
    [length][depth].
    """
    kinds = {}
    for kind, (lengths, depths, grid) in _grids(cells).items():
        rows = [[grid[length, depth] for depth in depths] for length in lengths]
        kinds[kind] = {
            "lengths": lengths,
            "depths": depths,
            "accuracy": [[round(cell.accuracy, 6) for cell in row] for row in rows],
            "logprob": [[round(cell.logprob, 6) for cell in row] for row in rows],
        }
    return {"samples": cells[0].samples, "kinds": kinds}


def draw(content: dict[str, Any], path: Path) -> None:
    """Write a PNG with a heat map of each kind in the content of a JSON."""
    kinds = content["kinds"]
    widest = max(len(grid["lengths"]) for grid in kinds.values())
    figure = Figure(figsize=((2.5 + 0.7 * widest) * len(kinds), 4), layout="constrained")
    for number, (kind, grid) in enumerate(kinds.items(), start=1):
        image = panel(figure.add_subplot(1, len(kinds), number), grid, kind)
    figure.colorbar(image, ax=figure.axes, label="right answers")
    save(figure, path)


def panel(axes: Any, grid: dict[str, Any], title: str) -> Any:
    """Draw one kind's grid on `axes`: lengths across, depths down, each cell with its share."""
    by_depth = list(zip(*grid["accuracy"], strict=True))
    depths = [f"{depth:.0%}" for depth in grid["depths"]]
    image = heat_map(axes, by_depth, grid["lengths"], depths)
    axes.set(xlabel="tokens", ylabel="depth of the fact", title=title)
    return image


def _grids(
    cells: Sequence[Cell],
) -> dict[str, tuple[list[int], list[float], dict[tuple[int, float], Cell]]]:
    """Kind → lengths, depths, and the cell of each pair."""
    result = {}
    for kind in dict.fromkeys(cell.kind for cell in cells):
        mine = [cell for cell in cells if cell.kind == kind]
        lengths = sorted({cell.length for cell in mine})
        depths = sorted({cell.depth for cell in mine})
        result[kind] = lengths, depths, {(cell.length, cell.depth): cell for cell in mine}
    return result
