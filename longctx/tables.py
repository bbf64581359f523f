"""Tables of figures on the terminal, with every character of them.

What does not fit beside the rest is not cut: it follows in a table below. Output that is no
terminal has each table whole, without lines or colours, however wide it is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

FOLDED = 28  # columns of a terminal that a text which may be folded is given at least
WIDEST = 10_000  # columns, at which nothing is wrapped


class _Console(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render without control characters: names, notes and keys of runs are anybody's text, and
        an escape sequence in them would drive the terminal.
        """
        for text, style, control in super().render(renderable, options):
            if not control and not text.isprintable():
                text = "".join(x if x.isprintable() or x == "\n" else shown_for(x) for x in text)
            yield Segment(text, style, control)

    def on_broken_pipe(self) -> None:  # rich would end the process here
        raise


def shown_for(letter: str) -> str:
    """Return what stands for an unprintable letter, as wide as rich has measured it."""
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


def grid(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]], keys: int = 1) -> None:
    """Print `columns` of `rows`, of which the first `keys` name a row; numbers to three figures,
    what a row lacks left empty.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.pad_edge = False
    for column in columns:
        table.add_column(Text(column.replace("_", " ")))
    for row in rows:
        table.add_row(*(Text(cell(row.get(column))) for column in columns))
    show(table, keys)


def show(table: Table, keys: int = 1, output: Console | None = None) -> None:
    """Print `table`; on a terminal that is too narrow for it as several, which all begin with its
    first `keys` columns, or, where not even these fit, a value a line.

    A column with overflow="fold" may be broken into lines, others never are; a heading only between
    words.
    """
    output = output or console()
    if not output.is_terminal:
        output.width = WIDEST
        plain = subset(table, range(len(table.columns)), output)
        plain.box, plain.pad_edge, plain.title = None, False, None
        if table.title:
            output.print(table.title, highlight=False)
        output.print(plain)
        output.print()
        return
    parts = grouped(table, keys, output)
    if parts is None:
        print_values(table, output)
        return
    for part in parts:
        output.print(part)


def grouped(table: Table, keys: int, output: Console) -> list[Table] | None:
    """`table` cut into tables that fit `output`; None where a column does not fit beside the
    first `keys`.
    """
    count = len(table.columns)
    one_table = subset(table, range(count), output)
    if natural_width(one_table, output) <= output.width:
        return [one_table]
    if least_width(table, range(count), output) <= output.width or count <= keys:
        return [subset(table, range(count), output, wraps=True)]
    groups: list[list[int]] = [[]]
    for column in range(keys, count):
        wider = [*range(keys), *groups[-1], column]
        if groups[-1] and least_width(table, wider, output) > output.width:
            groups.append([])
        groups[-1].append(column)
        if least_width(table, [*range(keys), *groups[-1]], output) > output.width:
            return None
    parts = [subset(table, [*range(keys), *group], output, wraps=True) for group in groups]
    for part in parts[1:]:
        part.title = None
    return parts


def subset(table: Table, columns: Sequence[int], output: Console, wraps: bool = False) -> Table:
    """The `columns` of `table`, with headings of several lines where it `wraps`."""
    part = Table(
        title=table.title,
        title_justify=table.title_justify,
        title_style=table.title_style,
        box=table.box,
        padding=table.padding,
        show_header=table.show_header,
        pad_edge=table.pad_edge,
    )
    chosen = [table.columns[number] for number in columns]
    for column in chosen:
        heading, widest = text_of(column.header), 0
        if wraps:
            widest = max((width_of(one) for one in column.cells), default=0)
            heading = Text("\n".join(wrapped(heading.plain, widest)), heading.style)
        part.add_column(
            heading,
            justify=column.justify,
            style=column.style,
            overflow="fold",
            no_wrap=column.overflow != "fold" or not wraps,
            min_width=min(FOLDED, widest) if column.overflow == "fold" else None,
        )
    for number, row in enumerate(table.rows):
        cells = [text_of(list(column.cells)[number]) for column in chosen]
        part.add_row(*cells, style=row.style, end_section=row.end_section)
    return part


def wrapped(heading: str, width: int) -> list[str]:
    """The lines of a heading over a column of `width`, broken between words."""
    longest = max(map(len, heading.split()), default=0)
    return textwrap.wrap(
        heading, max(width, longest, 1), break_long_words=False, break_on_hyphens=False
    ) or [""]


def least_width(table: Table, columns: Sequence[int], output: Console) -> int:
    """Columns of a terminal that `columns` of `table` take, with folded texts at FOLDED."""
    part = subset(table, columns, output, wraps=True)
    for column in part.columns:
        if not column.no_wrap:
            column.width = column.min_width
    return natural_width(part, output)


def natural_width(table: Table, output: Console) -> int:
    """Columns of a terminal that `table` takes where nothing is folded."""
    options = output.options.update(width=WIDEST)
    return Measurement.get(output, options, table).maximum


def text_of(cell: RenderableType) -> Text:
    """A cell as text."""
    return cell if isinstance(cell, Text) else Text(str(cell))


def width_of(cell: RenderableType) -> int:
    """Columns of a terminal that the longest line of a cell takes."""
    return max((line.cell_len for line in text_of(cell).split()), default=0)


def print_values(table: Table, output: Console) -> None:
    """Print a value a line, its heading before it, an empty line after each row."""
    if table.title:
        output.print(table.title, style=table.title_style or "", soft_wrap=True)
    headings = [text_of(column.header).plain for column in table.columns]
    for number in range(table.row_count):
        for heading, column in zip(headings, table.columns, strict=True):
            value = text_of(list(column.cells)[number])
            output.print(Text.assemble(f"  {heading}: ", value), soft_wrap=True)
        output.print()


def cell(value: Any) -> str:
    """A value as a person reads it: thousands separated, fractions to three significant figures."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
