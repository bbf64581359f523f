"""Tables of figures on the terminal, with every character of them.

A table that is too wide is not cut: the terminal breaks its lines. Output that is no terminal has
each table whole, without lines or colours, however wide it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from longctx.files import printable

WIDEST = 10_000  # columns at which nothing is wrapped


class _Console(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render without control characters: anybody can write names, notes and keys of runs, and
        an escape sequence in them would drive the terminal.
        """
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, "\n"), style, control)

    def on_broken_pipe(self) -> None:  # rich would end the process here
        raise


def console(stderr: bool = False) -> Console:
    """Return a console on stdout, or stderr. It prints no control characters of a text, takes no
    [name] in a path for markup, and wraps nothing if it is no terminal. It raises BrokenPipeError
    if nobody reads it any more.
    """
    output = _Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not output.is_terminal:
        output.width = WIDEST
    return output


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts whole, with columns of numbers on the right."""
    output, table = console(), Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column, heading in enumerate(headings):
        cells = [row[column] for row in rows]
        is_number = column > 0 and all(not cell or cell.lstrip("-")[:1].isdigit() for cell in cells)
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    output.width = WIDEST
    if title:
        output.print(title, style="bold")
    output.print(table, soft_wrap=True)
    if not output.is_terminal:
        output.print()


def grid(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print `columns` of `rows`: numbers to three figures, an empty cell for a missing value."""
    headings = [column.replace("_", " ") for column in columns]
    show(title, headings, [[cell(row.get(column)) for column in columns] for row in rows])


def cell(value: Any) -> str:
    """Write a value for a reader: thousands separated, fractions to three significant figures."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def count_of(number: int, noun: str) -> str:
    """Return the number and the noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
