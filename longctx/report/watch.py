"""Follow a run that another process trains: a line for each row of its metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from longctx import tables
from longctx.report.cost import cost_of
from longctx.report.run_view import ending, kernel_lock
from longctx.runs.metrics import Row, Shown, line
from longctx.runs.metrics_file import Tail
from longctx.runs.run_folder import is_training, read_config

PAUSE = 0.5  # seconds between two looks


def watch(folder: Path, price: float | None = None) -> None:
    """Print the newest row of the run in `folder` and the later ones, until no process trains it;
    then its end, with its cost at `price` for an hour of one GPU.

    Raises ValueError or OSError if there is none.
    """
    config, tail = read_config(folder), Tail(folder)
    # Asked before the rows are read, as in `following`.
    training = is_training(folder)
    rows = tail.rows()
    if not rows and not training:
        raise ValueError(
            f"{folder}: no metrics yet and no process trains it; start the run, or watch another"
        )
    console = tables.console()
    numbers: Row = {key: value for row in rows for key, value in row.items()}
    for row in following(folder, tail, rows[-1:]):
        numbers |= row
        console.print(f"step {row['step']:,}  {line(row, Shown.WATCH)}", soft_wrap=True)
    end = ending(numbers.get("step", 0), config.get("max_steps"), is_training(folder))
    lock: dict[str, str] = {}
    with suppress(OSError, ValueError, AttributeError):
        lock = kernel_lock(folder)
    cost = cost_of(config, numbers, lock, price)
    spent = [f"hardware {cost.hardware}"]
    spent += [f"kernel {lock['kernel']}"] if "kernel" in lock else []
    spent += [f"GPU hours {cost.gpu_hours:,.2f}"] if cost.gpu_hours is not None else []
    spent += [f"cost {cost.money:,.2f} at {price} an hour"] if cost.money is not None else []
    console.print("  ".join([end, *spent]), soft_wrap=True)


def following(folder: Path, tail: Tail, rows: list[Row]) -> Iterator[Row]:
    """Yield `rows` and the later ones, until the process that trains the run ends."""
    training = True
    while True:
        yield from rows
        if not training:
            return
        # Asked before the rows are read, so that rows of the last moment are not missed.
        training = is_training(folder)
        if training:
            time.sleep(PAUSE)
        rows = tail.rows()
