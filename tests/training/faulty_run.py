"""A training run with a fault; several processes share it, and rank 1 has the fault.

python -m tests.training.faulty_run FAULT devices=2 key=value ...
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from longctx import cli
from longctx.training import batches, loop
from longctx.training.module import TrainingModule

HOUR = 3600.0
FOLDER = Path(os.environ.get("FAULTY_RUN", ""))  # for files of a fault
is_rank_1 = os.environ.get("LOCAL_RANK") == "1"
load, optimizer_step, validate = batches.load, loop.optimizer_step, loop.validate
training_step, clock = TrainingModule.training_step, time.perf_counter


def absent() -> None:
    """Kill rank 1 before it has met the others."""
    if is_rank_1:
        os.kill(os.getpid(), signal.SIGKILL)


def grow() -> None:
    """Rank 1 adds a document to the corpus before it opens any."""

    def grow_and_load(*arguments: Any) -> Any:
        (FOLDER / "new.txt").write_text("many words that rank 0 has not seen " * 20)
        return load(*arguments)

    if is_rank_1:
        batches.load = grow_and_load


def lag() -> None:
    """Let the clock of rank 1 count an hour more in every step and validation."""
    ahead = [0.0]

    def slowed(function: Any) -> Any:
        def slow(*arguments: Any) -> Any:
            ahead[0] += HOUR
            return function(*arguments)

        return slow

    if is_rank_1:
        loop.optimizer_step = slowed(optimizer_step)
        loop.validate = slowed(validate)
        time.perf_counter = lambda: clock() + ahead[0]


def wait() -> None:
    """Let the forward pass wait for the device, so that no CUDA graph can capture it."""

    def waiting(*arguments: Any) -> Any:
        loss = training_step(*arguments)
        loss.item()
        return loss

    TrainingModule.training_step = waiting  # type: ignore[method-assign]


if __name__ == "__main__":
    faults = {"absent": absent, "grow": grow, "lag": lag, "wait": wait}
    faults[sys.argv[1]]()
    sys.exit(cli.main(["train", *sys.argv[2:]]))
