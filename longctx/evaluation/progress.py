"""How far an evaluation is: a bar on the terminal, and one line that says how long it takes.

A forward on a CPU can take a minute, and documents are read while others are scored. So the line
comes after the first forward, when it is known how long one takes. It counts what has been read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

LONG = 60.0  # seconds: an evaluation that takes less says nothing
T = TypeVar("T")


class Progress:
    """`with Progress("tokens") as progress: progress.advance(tokens)`, once per batch.

    `total` is the number of units to score, None until `counted` has seen all of them. With
    `warms_up` the first batch compiles kernels and its time says nothing.
    """

    def __init__(
        self, unit: str, total: int | None = None, warms_up: bool = False, visible: bool = True
    ) -> None:
        self.unit, self.total, self.visible = unit, total, visible
        self.read = total or 0  # units of the documents read so far
        self.done, self.done_before = 0, 0
        self.warms_up, self.is_said = warms_up, False
        columns = SpinnerColumn(), TextColumn("scoring {task.completed:,} " + unit), BarColumn()
        self.bar = Bar(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (visible and sys.stderr.isatty()),
        )
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def counted(self, parts: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
        """Yield `parts`, and add up their units."""
        for part in parts:
            self.read += size(part)
            yield part
        self.total = self.read
        self.bar.update(self.task, total=self.total)

    def advance(self, units: int) -> None:
        """Count the units of one batch, and say once how long all take."""
        self.done += units
        self.bar.update(self.task, advance=units)
        now = time.monotonic()
        if self.warms_up:
            self.warms_up, self.began, self.done_before = False, now, self.done
        elif self.visible and not self.is_said:
            self.is_said = True
            each = (now - self.began) / (self.done - self.done_before)
            seconds = each * (self.read - self.done_before)
            if seconds >= LONG:
                at_least = "" if self.total is not None else "at least "
                self.bar.console.print(
                    f"scoring {at_least}{self.read:,} {self.unit}, "
                    f"about {seconds / 60:,.0f} minutes in all",
                    highlight=False,
                )
