"""Tables of figures on the terminal, with every character of them.

Columns that do not fit are not cut: they follow in a table below. Output that is no terminal has
each table whole, without lines or colours, however wide it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

WIDEST = 10_000  # columns at which nothing is wrapped


class _Console(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render without control characters: anybody can write names, notes and keys of runs, and
        an escape sequence in them would drive the terminal.
        """
        for text, style, control in super().render(renderable, options):
            if not control and not text.isprintable():
                text = "".join(
                    letter if letter.isprintable() or letter == "\n" else shown_for(letter)
                    for letter in text
                )
            yield Segment(text, style, control)

    def on_broken_pipe(self) -> None:  # rich would end the process here
        raise


def shown_for(letter: str) -> str:
    """Return a substitute for an unprintable letter, as wide as rich has measured it."""
    return (" " if letter.isspace() else "\ufffd") * cell_len(letter)


def console(stderr: bool = False) -> Console:
    """Return a console on stdout, or stderr. It prints no control characters of a text, takes no
    [name] in a path for markup, and wraps nothing if it is no terminal. It raises BrokenPipeError
    if nobody reads it any more.
    """
    output = _Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not output.is_terminal:
        output.width = WIDEST
    return output


def text_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table of texts: columns of numbers on the right; others may have several lines."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    texts = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    for column, heading in enumerate(headings):
        cells = [row[column].plain for row in texts]
        is_number = column > 0 and all(not cell or cell.lstrip("-")[:1].isdigit() for cell in cells)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(Text(heading), justify=justify, overflow="fold")
    for row in texts:
        table.add_row(*row)
    return table


def grid(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]], keys: int = 1) -> None:
    """Print `columns` of `rows`, of which the first `keys` name a row; numbers to three figures,
    an empty cell for a missing value.
    """
    headings = [column.replace("_", " ") for column in columns]
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    table = text_table(title, headings, cells)
    table.padding = (0, 1, 0, 0)
    show(table, keys)


def show(table: Table, keys: int = 1, output: Console | None = None) -> None:
    """Print `table`, or several if the terminal is too narrow. Each begins with the first `keys`
    columns.

    A cell is broken into lines only if it and the first columns are too wide.
    """
    output = output or console()
    if not output.is_terminal:
        output.width = WIDEST
        table.box, table.pad_edge = None, False
        if table.title:
            output.print(table.title, highlight=False)
            table.title = None
        output.print(table)
        output.print()
        return
    if measured(table, output).maximum <= output.width:
        output.print(table)
        return
    # Each group takes as many columns as fit; a text that is too wide has lines, in its own group
    groups: list[list[int]] = [[]]
    for column in range(keys, len(table.columns)):
        wider = part_of(table, [*range(keys), *groups[-1], column])
        if groups[-1] and measured(wider, output).maximum > output.width:
            groups.append([])
        groups[-1].append(column)
    for number, group in enumerate(groups):
        part = part_of(table, [*range(keys), *group])
        part.title = None if number else table.title
        output.print(part)


def measured(table: Table, output: Console) -> Measurement:
    """Return the least and the natural width of `table`."""
    return Measurement.get(output, output.options.update(width=WIDEST), table)


def part_of(table: Table, columns: Sequence[int]) -> Table:
    """Return the `columns` of `table`, with a line for each word of a heading."""
    part = copy(table)
    chosen = [table.columns[number] for number in columns]
    part.columns = [
        # Broken words are hard to read, but an ellipsis would lose figures
        replace(column, _index=index, header="\n".join(str(column.header).split()), overflow="fold")
        for index, column in enumerate(chosen)
    ]
    return part


def cell(value: Any) -> str:
    """Write a value for a reader: thousands separated, fractions to three significant figures."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def count_of(number: int, noun: str) -> str:
    """Return the number and the noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
