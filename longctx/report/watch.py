"""Follow a run that another process trains: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.live import Live
from rich.table import Table
from rich.text import Text

from longctx import tables
from longctx.report.cost import cost_of
from longctx.report.run_view import ending, kernel_lock
from longctx.runs.metrics import Row, Shown, duration, finite, line, present
from longctx.runs.metrics_file import Tail
from longctx.runs.run_folder import is_training, read_config

# Seconds between two looks.
PAUSE = 0.5
BARS = "▁▂▃▄▅▆▇█"
# Bars of a curve.
WIDTH = 40


class Latest:
    """The newest numbers of a run and its losses so far."""

    def __init__(self, folder: Path, price: float | None = None) -> None:
        self.folder, self.price = folder, price
        self.config = read_config(folder)
        self.steps = self.config.get("max_steps")
        self.lock: dict[str, str] = {}
        with suppress(OSError, ValueError, AttributeError):
            self.lock = kernel_lock(folder)
        self.numbers: Row = {}
        self.losses: deque[float] = deque(maxlen=10_000)

    def add(self, row: Row) -> None:
        """Add the next row."""
        self.numbers |= row
        self.losses.extend(finite([row.get("loss")]))

    def ended(self, training: bool) -> str:
        """Say how far the run is."""
        return ending(self.numbers.get("step", 0), self.steps, training)

    def view(self, training: bool) -> Table:
        """Return the numbers one below the other, the loss as a curve."""
        table = Table(title=str(self.folder), title_justify="left", show_header=False, box=None)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        table.add_row("run", Text(self.ended(training)))
        for metric, label, value in present(self.numbers, Shown.WATCH):
            table.add_row(label, metric.text(value))
        if training and "ms_per_step" in self.numbers and isinstance(self.steps, int):
            left = (self.steps - self.numbers["step"]) * self.numbers["ms_per_step"] / 1000
            table.add_row("time left", duration(left))
        for label, text in self.cost():
            table.add_row(label, Text(text))
        table.add_row("loss so far", sparkline(list(self.losses)))
        return table

    def cost(self) -> list[tuple[str, str]]:
        """Return labels and texts: hardware and kernel, and GPU hours and cost so far."""
        cost = cost_of(self.config, self.numbers, self.lock, self.price)
        lines = [("hardware", cost.hardware), ("kernel", self.lock.get("kernel", ""))]
        if cost.gpu_hours is not None:
            lines.append(("GPU hours", f"{cost.gpu_hours:,.2f}"))
        if cost.money is not None:
            lines.append(("cost", f"{cost.money:,.2f} at {self.price} an hour"))
        return [line for line in lines if line[1]]


def watch(folder: Path, price: float | None = None) -> None:
    """Show the run in `folder` until no process trains it, with its cost at `price` for an hour of
    one GPU.

    Raises ValueError or OSError if there is none.
    """
    latest = Latest(folder, price)
    tail = Tail(folder)
    console = tables.console()
    # Asked before the rows are read, as in `following`.
    training = is_training(folder)
    rows = tail.rows()
    if not rows and not training:
        raise ValueError(
            f"{folder}: no metrics yet and no process trains it; start the run, or watch another"
        )
    # Plain lines begin with the newest row; the live view draws all losses so far.
    for row in rows[:-1]:
        latest.add(row)
    with (
        Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live
    ):
        for new in following(folder, tail, rows[-1:]):
            if new is not None:
                latest.add(new)
                if live is None:
                    text = f"step {new['step']:,}  {line(new, Shown.WATCH)}"
                    console.print(text, soft_wrap=True)
            elif live is not None:
                live.update(latest.view(is_training(folder)), refresh=True)
    if live is None:
        spent = (f"{label} {text}" for label, text in latest.cost())
        console.print("  ".join([latest.ended(is_training(folder)), *spent]), soft_wrap=True)


def following(folder: Path, tail: Tail, rows: list[Row]) -> Iterator[Row | None]:
    """Yield `rows` and the later ones, None whenever there are no more for now, until the process
    that trains the run ends.
    """
    training = True
    while True:
        yield from rows
        yield None
        if not training:
            return
        # Asked before the rows are read, so that rows of the last moment are not missed.
        training = is_training(folder)
        if training:
            time.sleep(PAUSE)
        rows = tail.rows()


def sparkline(values: list[float]) -> str:
    """Draw the values as at most WIDTH bars, each the mean of its share, between the least and the
    largest.
    """
    if not values:
        return ""
    count = min(WIDTH, len(values))
    edges = [bar * len(values) // count for bar in range(count + 1)]
    means = [fmean(values[first:end]) for first, end in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    bars = "".join(
        BARS[round((mean - low) / span * (len(BARS) - 1)) if span else 0] for mean in means
    )
    return f"{bars}  {means[0]:.3g} → {means[-1]:.3g}"
