"""Tables of figures on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def grid(
    title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]], lines: bool = True
) -> None:
    """Print `columns` of `rows`; numbers to three figures, what a row lacks left empty.

    Without `lines` between the columns more of them go into a terminal.
    """
    headings = (column.replace("_", " ") for column in columns)
    shown = Table(*headings, title=title, title_justify="left")
    if not lines:
        shown.box, shown.padding, shown.pad_edge = box.SIMPLE_HEAD, (0, 0), False
    for row in rows:
        shown.add_row(*(cell(row.get(column)) for column in columns))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(shown)


def cell(value: Any) -> str:
    """A value as a person reads it: thousands separated, fractions to three significant figures."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
