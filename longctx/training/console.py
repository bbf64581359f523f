"""The terminal of a run: a bar while it trains, or lines without a terminal; a curve and a table at
the end.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from longctx import files, system, tables
from longctx.runs import metrics, metrics_file
from longctx.runs.metrics import Metric, Row, Shown, figures, finite, is_step
from longctx.runs.run_folder import checkpoints

WIDTH, HEIGHT = 60, 8  # characters of the loss curve, each of 2 x 4 dots
FEWEST_POINTS = 4  # that show a curve
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of a braille character
BLANK = 0x2800


class Display:
    """Show the rows of a run as they come; print nothing if `silent`."""

    def __init__(self, steps: int, first_step: int, silent: bool = False) -> None:
        self.console = tables.console()
        self.console.quiet = silent
        self.steps, self.steps_done = steps, first_step
        self.bar = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(16),
            # In a narrow terminal they take several lines, and the steps and the time stay whole
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),
            TimeRemainingColumn(),
            console=self.console,
            disable=silent or not self.console.is_terminal,
        )
        self.task = self.bar.add_task(
            "", total=steps, completed=first_step, numbers="first step ..."
        )

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        with self._heard():
            self.console.print(text, soft_wrap=True)

    def print(self, table: Table) -> None:
        """Print a table without breaking lines: a path that is broken in two cannot be copied."""
        width, self.console.width = self.console.width, tables.WIDEST
        with self._heard():
            self.console.print(table, soft_wrap=True)
        self.console.width = width

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Raise SIGHUP if nobody reads stdout any more, as after `| head`: the run saves and ends,
        as it does if its terminal is gone. Print nothing from then on.
        """
        try:
            yield
        except BrokenPipeError:
            self.console.quiet = True
            files.silence_stdout()
            signal.raise_signal(signal.SIGHUP)

    def stepped(self, step: int) -> None:
        """Note that `step` is done."""
        self.steps_done = step
        self.bar.update(self.task, completed=step)

    def show(self, row: Row) -> None:
        """Show a logged row: in the bar, or as a line if the output is no terminal."""
        if is_step(row) and not self.bar.disable:
            self.bar.update(self.task, completed=row["step"], numbers=brief(row))
            return
        time_left = self.time_left(row)
        ending = f"  {time_left} left" if time_left else ""
        self.say(f"step {row['step']:,}/{self.steps:,}  {brief(row)}{ending}")

    def time_left(self, row: Row) -> str:
        """Return the time that the steps after `row` take at its pace, empty if it has none."""
        steps = self.steps - row["step"]
        if not is_step(row) or not steps or not row.get("ms_per_step"):
            return ""
        return metrics.duration(steps * row["ms_per_step"] / 1000)


def brief(row: Row) -> str:
    """Return a row of metrics.jsonl in one line."""
    # A window may have no target token: pieces of conversations without an answer
    has_loss = "loss" in row or "val_loss" in row
    parts = [
        "" if is_step(row) else "validation",
        "" if has_loss else "nothing scored",
        metrics.line(row, Shown.CONSOLE),
    ]
    return "  ".join(part for part in parts if part)


def closing_table(
    folder: Path,
    kernels: dict[str, str],
    finished: bool,
    steps: int,
    out_of_patience: bool = False,
    chat: bool = False,
    plugins: str = "",
) -> Table:
    """Return the results of a run after `steps`, its folder, and the next commands.

    finished: it has done all its steps. out_of_patience: its last validations brought no lower
    loss. plugins: the argument that names its plugins.
    """
    rows = metrics_file.read(folder)
    numbers = figures(rows)
    if numbers.get("step") != steps:  # it was stopped after steps that no row has counted
        numbers.pop("tokens_seen", None)
        numbers["step"] = steps
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for metric in metrics.shown(Shown.CLOSING):
        if metric.key in numbers:
            table.add_row(metric.label, summary(metric, rows, numbers))
    ran = ", ".join(f"{backend}: {kernel}" for backend, kernel in kernels.items())
    table.add_row("attention", ran or "did not run")
    table.add_row("run", str(folder))
    if checkpoints(folder):
        more = f" max_steps={2 * numbers['step']}" if finished else ""
        more += " patience=null" if out_of_patience else ""
        longctx, path = system.typed_command(), shlex.quote(str(folder))
        path += f" {shlex.quote(plugins)}" if plugins else ""
        table.add_row("evaluate", f"{longctx} eval {path}")
        text = f"chat {path}" if chat else f"generate {path} prompt='Once upon a time'"
        table.add_row("write text", f"{longctx} {text}")
        table.add_row("train on", f"{longctx} resume {path}{more}")
    return table


def summary(metric: Metric, rows: list[Row], numbers: Row) -> str:
    """Return the figure of a whole run; with its first value, if training improves it."""
    text = metric.text(numbers[metric.key])
    if metric.of_run == "median":
        return f"{text} (median)"
    column = metrics.values(rows, metric.key)
    if metric.of_run == "last" and metric.better is not None and len(column) > 1:
        return f"{metric.text(column[0])} → {text}"
    return text


def loss_curve(rows: Sequence[Row]) -> list[str]:
    """Return lines that show the loss over the steps of `rows`; none if there is no curve yet."""
    points = [
        (row["step"], row["loss"]) for row in rows if is_step(row) and finite([row.get("loss")])
    ]
    if len(points) < FEWEST_POINTS:
        return []
    steps, losses = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    low, high = losses.min(), losses.max()
    # The height of the curve in each column of dots, interpolated between the steps
    columns = np.arange(2 * WIDTH)
    along = np.interp(columns, np.linspace(0, 2 * WIDTH - 1, 2), [steps[0], steps[-1]])
    heights = (high - np.interp(along, steps, losses)) / max(high - low, 1e-9)
    dots = np.rint(heights * (4 * HEIGHT - 1)).astype(int)
    canvas = np.full((HEIGHT, WIDTH), BLANK)
    for column, dot in zip(columns.tolist(), dots.tolist(), strict=True):
        canvas[dot // 4, column // 2] |= DOTS[column % 2][dot % 4]
    # The largest loss at the top, the smallest at the bottom, the steps below
    labels = [f"{high:.2f}", *[""] * (HEIGHT - 2), f"{low:.2f}"]
    margin = max(map(len, labels))
    first, last = f"{int(steps[0]):,}", f"step {int(steps[-1]):,}"
    return [
        f"{'loss':>{margin}}",
        *(
            f"{label:>{margin}} │{''.join(map(chr, line))}"
            for label, line in zip(labels, canvas.tolist(), strict=True)
        ),
        f"{'':>{margin}} └{'─' * WIDTH}",
        f"{'':>{margin}}  {first}{last:>{WIDTH - len(first)}}",
    ]
