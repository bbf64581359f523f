"""A training run whose process 1 sleeps for 0.5 s in every step, and for 5 s in every validation.

python tests/training/uneven_run.py devices=2 key=value ...
"""

import os
import sys
import time
from typing import Any

from longctx import cli
from longctx.training import loop

whole_step, whole_validation = loop.optimizer_step, loop.validate


def slow_step(*arguments: Any, **options: Any) -> Any:
    time.sleep(0.5)
    return whole_step(*arguments, **options)


def slow_validation(*arguments: Any) -> Any:
    time.sleep(5)
    return whole_validation(*arguments)


if __name__ == "__main__":
    if os.environ.get("LOCAL_RANK") == "1":
        loop.optimizer_step, loop.validate = slow_step, slow_validation
    sys.exit(cli.main(["train", *sys.argv[1:]]))
