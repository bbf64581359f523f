"""Tables of figures on the terminal, with every character of them.

A table that is too wide is not cut: the terminal breaks its lines. Output that is no terminal has
each table whole, without lines or colours, however wide it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

WIDEST = 10_000  # columns at which nothing is wrapped


class _Console(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render without control characters: anybody can write names, notes and keys of runs, and
        an escape sequence in them would drive the terminal. Substitutes are as wide as rich has
        measured them.
        """
        for text, style, control in super().render(renderable, options):
            shown = "".join(
                letter
                if letter.isprintable() or letter == "\n"
                else (" " if letter.isspace() else "\ufffd") * cell_len(letter)
                for letter in text
            )
            yield Segment(text if control else shown, style, control)

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


def text_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str | Text]], gap: int = 2
) -> Table:
    """Return a table of texts: columns of numbers on the right; others may have several lines."""
    table = Table(title=title, box=None, padding=(0, gap, 0, 0))
    texts = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    for column, heading in enumerate(headings):
        cells = [row[column].plain for row in texts]
        is_number = column > 0 and all(not cell or cell.lstrip("-")[:1].isdigit() for cell in cells)
        table.add_column(Text(heading), overflow="fold")
        if is_number:
            table.columns[-1].justify = "right"
    for row in texts:
        table.add_row(*row)
    return table


def grid(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print `columns` of `rows`: numbers to three figures, an empty cell for a missing value."""
    headings = [column.replace("_", " ") for column in columns]
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    show(text_table(title, headings, cells, gap=1))


def show(table: Table) -> None:
    """Print a table without a box whole."""
    output = console()
    output.width = WIDEST
    if table.title:
        output.print(table.title, style="bold")
    table.title, table.pad_edge = None, False
    output.print(table, soft_wrap=True)
    if not output.is_terminal:
        output.print()


def cell(value: Any) -> str:
    """Write a value for a reader: thousands separated, fractions to three significant figures."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def count_of(number: int, noun: str) -> str:
    """Return the number and the noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
