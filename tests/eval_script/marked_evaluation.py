"""eval.py on several processes, each of which leaves a file named after its number in the folder
MARKS when it begins to score: how many numbers of the weights it holds.
"""

import os
import sys
from pathlib import Path
from typing import Any

from longctx import cli
from longctx.evaluation.score import Scorer
from longctx.parallel import sharding

forward = Scorer._forward


def marked(scorer: Scorer, *arguments: Any) -> Any:
    mark = Path(os.environ["MARKS"], os.environ.get("LOCAL_RANK", "0"))
    if not mark.exists():
        held = sum(sharding.local(x).numel() for x in scorer.model.parameters())
        mark.write_text(str(held))
    return forward(scorer, *arguments)


if __name__ == "__main__":
    Scorer._forward = marked
    sys.exit(cli.main(["eval", *sys.argv[1:]]))
