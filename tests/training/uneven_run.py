"""A training run whose process 1 sleeps for 0.5 s in every step, and for 5 s in every validation.
By its own clock it is an hour each time, so that a loaded machine cannot make another the slowest.

python tests/training/uneven_run.py devices=2 key=value ...
"""

import os
import sys
import time
from typing import Any

from longctx import cli
from longctx.training import loop

HOUR = 3600.0
whole_step, whole_validation = loop.optimizer_step, loop.validate
clock, ahead = time.perf_counter, [0.0]


def slow_step(*arguments: Any, **options: Any) -> Any:
    time.sleep(0.5)
    ahead[0] += HOUR
    return whole_step(*arguments, **options)


def slow_validation(*arguments: Any) -> Any:
    time.sleep(5)
    ahead[0] += HOUR
    return whole_validation(*arguments)


if __name__ == "__main__":
    if os.environ.get("LOCAL_RANK") == "1":
        loop.optimizer_step, loop.validate = slow_step, slow_validation
        time.perf_counter = lambda: clock() + ahead[0]
    sys.exit(cli.main(["train", *sys.argv[1:]]))
