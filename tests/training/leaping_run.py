"""A training run on two processes, of which the second has a loss ten times as large in step 12.

LEAP names a folder, in which each process writes for every step whether it dropped it.
"""

import os
import sys
from pathlib import Path
from typing import Any

from longctx import cli
from longctx.training import loop

step_of_run = loop.optimizer_step


def leaping(state: Any, batch: Any, parallel: Any, mark: Any, drops: Any) -> Any:
    step = state.steps_done + 1
    if step == 12 and parallel.rank == 1:
        weigh = batch.weigh
        object.__setattr__(batch, "weigh", lambda weight: weigh(10 * weight))

    def recorded(loss: float, norm: float) -> bool:
        drop: bool = drops(loss, norm)
        with open(Path(os.environ["LEAP"], f"rank-{parallel.rank}"), "a") as file:
            file.write(f"{step} {int(drop)}\n")
        return drop

    return step_of_run(state, batch, parallel, mark, recorded)


if __name__ == "__main__":
    loop.optimizer_step = leaping
    sys.exit(cli.main(["train", *sys.argv[1:]]))
