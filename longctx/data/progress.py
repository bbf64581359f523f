"""Progress on the terminal while documents become tokens: one moving line, and a last one that
stays.
"""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """`with Progress("tokenizing", total) as progress: progress.advance(documents, tokens)`.

    `total` is the number of documents, None if unknown. If stderr is no terminal there is only the
    last line, and none after an error.
    """

    def __init__(self, task: str, total: int | None):
        self._task_name = task
        self._began = time.monotonic()
        self._documents = 0
        self._tokens = 0
        columns = [
            SpinnerColumn(),
            TextColumn(f"data: {task}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
        ]
        console = Console(stderr=True)
        self._bar = Bar(
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(task, total=total, state="")

    def advance(self, documents: int, tokens: int) -> None:
        self._documents += documents
        self._tokens += tokens
        self._bar.update(self._task, advance=documents, state=self._state())

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if kind is None:
            count = f"{self._state()} in " if self._documents else ""
            seconds = time.monotonic() - self._began
            print(f"data: {self._task_name}: {count}{seconds:.1f} s", file=sys.stderr)

    def _state(self) -> str:
        return f"{self._documents:,} documents, {self._tokens:,} tokens"
