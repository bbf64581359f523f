"""Follow a run that another process trains: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from longctx.report.runs import (
    NotARun,
    Row,
    ending,
    finite,
    is_training,
    memory,
    parsed,
    printable,
    read_config,
)

PAUSE = 0.5  # seconds between two looks
BARS = "▁▂▃▄▅▆▇█"
FORMATS = {
    "loss": ("loss", "{:.4f}"),
    "lr": ("lr", "{:.3g}"),
    "grad_norm": ("grad norm", "{:.3g}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "ms_per_step": ("ms/step", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "memory": ("peak GiB", "{:.1f}"),
    "tokens_seen": ("tokens", "{:,}"),
    "val_loss": ("val loss", "{:.4f}"),
    "val_perplexity": ("val perplexity", "{:,.2f}"),
}


class Tail:
    """The rows that a growing metrics.jsonl gains; a line without its end is kept until it has one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self._place, self._rest, self._file = 0, b"", 0

    def rows(self) -> list[Row]:
        """The rows since the last call; all of them again where a resumed run has replaced the
        file.
        """
        try:
            with open(self.path, "rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self._file or now.st_size < self._place:
                    self._place, self._rest, self._file = 0, b"", now.st_ino
                file.seek(self._place)
                new = file.read()
        except FileNotFoundError:
            return []
        self._place += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        rows = (parsed(line.decode("utf-8", "replace")) for line in lines)
        return [row for row in rows if row is not None]


class Latest:
    """The newest numbers of a run and its losses so far."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, read_config(folder).get("max_steps")
        self.numbers: Row = {}
        self.losses: deque[float] = deque(maxlen=10_000)

    def add(self, row: Row) -> None:
        """Take in the next row."""
        self.numbers |= row | ({"memory": memory(row)} if memory(row) is not None else {})
        self.losses.extend(finite([row.get("loss")]))

    def ended(self, training: bool) -> str:
        """How far the run is."""
        return ending(self.numbers.get("step", 0), self.steps, training)

    def view(self, training: bool) -> Table:
        """The numbers one below the other, the loss as a curve."""
        table = Table(
            title=printable(str(self.folder)), title_justify="left", show_header=False, box=None
        )
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        table.add_row("run", Text(self.ended(training)))
        for name, text in told(self.numbers):
            table.add_row(name, text)
        if training and "ms_per_step" in self.numbers and isinstance(self.steps, int):
            left = (self.steps - self.numbers["step"]) * self.numbers["ms_per_step"] / 1000
            table.add_row("time left", duration(left))
        table.add_row("loss so far", sparkline(list(self.losses)))
        return table


def watch(folder: Path) -> None:
    """Show the run in `folder` until no process trains it; raises ValueError or OSError where there
    is none.
    """
    latest, tail, console = Latest(folder), Tail(folder), Console(highlight=False)
    training, rows = is_training(folder), tail.rows()
    if not rows and not training:
        raise NotARun(
            f"{folder}: no metrics yet and no process trains it; start the run, or watch another"
        )
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            for row in following(folder, tail, rows):
                if row is not None:
                    latest.add(row)
                else:
                    live.update(latest.view(is_training(folder)), refresh=True)
    else:
        for row in rows[:-1]:
            latest.add(row)
        for row in following(folder, tail, rows[-1:]):
            if row is not None:
                latest.add(row)
                print(
                    f"step {row['step']:,}  "
                    + "  ".join(f"{name} {text}" for name, text in told(row)),
                    flush=True,
                )
        print(latest.ended(is_training(folder)), flush=True)


def following(folder: Path, tail: Tail, rows: list[Row]) -> Iterator[Row | None]:
    """`rows` and those to come, None whenever there are no more for now; ends with the process that
    trains the run.
    """
    training = True
    while True:
        yield from rows
        yield None
        if not training:
            return
        # Asked before the rows are read, so that those of the last moment are not missed.
        training = is_training(folder)
        if training:
            time.sleep(PAUSE)
        rows = tail.rows()


def told(row: Row) -> Iterator[tuple[str, str]]:
    """The names and numbers of a row, as text."""
    known = row if "memory" in row or memory(row) is None else row | {"memory": memory(row)}
    for key, (name, text) in FORMATS.items():
        if isinstance(known.get(key), int | float):
            yield name, text.format(known[key])


def sparkline(values: list[float], width: int = 40) -> str:
    """The values as at most `width` bars, each the mean of its share, between the least and the
    largest.
    """
    if not values:
        return ""
    count = min(width, len(values))
    means = [
        fmean(values[n * len(values) // count : (n + 1) * len(values) // count])
        for n in range(count)
    ]
    low, span = min(means), max(means) - min(means)
    bars = "".join(
        BARS[round((mean - low) / span * (len(BARS) - 1)) if span else 0] for mean in means
    )
    return f"{bars}  {means[0]:.3g} → {means[-1]:.3g}"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
