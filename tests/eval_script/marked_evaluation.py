"""eval.py on several processes, each of which leaves a file named after its number in the folder
MARKS when it begins to score. Where FULL is set, the disk is full when the result is written.
"""

import errno
import os
import sys
from pathlib import Path
from typing import Any

from longctx import cli
from longctx.evaluation import results
from longctx.evaluation.score import Scorer

forward = Scorer._forward


def marked(scorer: Scorer, *arguments: Any) -> Any:
    Path(os.environ["MARKS"], os.environ.get("LOCAL_RANK", "0")).touch()
    return forward(scorer, *arguments)


def full(*arguments: Any) -> Path:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    Scorer._forward = marked
    if "FULL" in os.environ:
        results.save = full
    sys.exit(cli.main(["eval", *sys.argv[1:]]))
