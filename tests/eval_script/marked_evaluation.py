"""eval.py on several processes, each of which leaves a file named after its number in the folder
MARKS when it begins to score.
"""

import os
import sys
from pathlib import Path
from typing import Any

from longctx import cli
from longctx.evaluation.scorer import Scorer

forward = Scorer._forward


def marked(scorer: Scorer, *arguments: Any) -> Any:
    Path(os.environ["MARKS"], os.environ.get("LOCAL_RANK", "0")).touch()
    return forward(scorer, *arguments)


if __name__ == "__main__":
    Scorer._forward = marked
    sys.exit(cli.main(["eval", *sys.argv[1:]]))
