"""A training run with a fault; several processes share it, and rank 1 has the fault.

python -m tests.training.faulty_run FAULT devices=2 key=value ...
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from longctx import cli
from longctx.training import batches
from longctx.training.module import TrainingModule

FOLDER = Path(os.environ.get("FAULTY_RUN", ""))  # for files of a fault
is_rank_1 = os.environ.get("LOCAL_RANK") == "1"
load, training_step = batches.load, TrainingModule.training_step


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


def wait() -> None:
    """Let the forward pass wait for the device, so that no CUDA graph can capture it."""

    def waiting(*arguments: Any) -> Any:
        loss = training_step(*arguments)
        loss.item()
        return loss

    TrainingModule.training_step = waiting  # type: ignore[method-assign]


if __name__ == "__main__":
    faults = {"absent": absent, "grow": grow, "wait": wait}
    faults[sys.argv[1]]()
    sys.exit(cli.main(["train", *sys.argv[2:]]))
