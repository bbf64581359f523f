"""A training run with a fault; several processes share it, and rank 1 has the fault.

python -m tests.training.faulty_run FAULT devices=2 key=value ...
"""

import os
import signal
import sys
from typing import Any

from longctx import cli, system
from longctx.training.module import TrainingModule

training_step = TrainingModule.training_step


def absent() -> None:
    """Kill rank 1 before it has met the others."""
    if os.environ.get("LOCAL_RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def wait() -> None:
    """Let the forward pass wait for the device, so that no CUDA graph can capture it."""

    def waiting(*arguments: Any) -> Any:
        loss = training_step(*arguments)
        loss.item()
        return loss

    TrainingModule.training_step = waiting  # type: ignore[method-assign]


if __name__ == "__main__":
    faults = {"absent": absent, "wait": wait}
    faults[sys.argv[1]]()
    system.exit_with(cli.main(["train", *sys.argv[2:]]))
