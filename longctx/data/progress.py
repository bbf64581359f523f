"""One line on the terminal while documents are tokenized, gone when they are; a line in a log stays silent until the end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """`with Progress("tokenizing", total) as progress: progress.advance(documents, tokens)`; `total` None if unknown."""

    def __init__(self, what: str, total: int | None):
        columns = [SpinnerColumn(), TextColumn(f"data: {what}"), BarColumn(), TextColumn("{task.fields[state]}")]
        console = Console(stderr=True)
        self._bar = Bar(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(what, total=total, state="")
        self._documents = self._tokens = 0

    def advance(self, documents: int, tokens: int) -> None:
        self._documents += documents
        self._tokens += tokens
        state = f"{self._documents:,} documents, {self._tokens / 1e6:,.1f} M tokens"
        self._bar.update(self._task, advance=documents, state=state)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
