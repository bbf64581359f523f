"""A training run whose corpus grows while it starts: rank 1 adds a document before it opens any.

python tests/training/growing_run.py DOCUMENT devices=2 key=value ...
"""

import os
import sys
from pathlib import Path
from typing import Any

from longctx import cli
from longctx.training import batches

if __name__ == "__main__":
    load = batches.load

    def grow_and_load(*arguments: Any) -> Any:
        Path(sys.argv[1]).write_text("many words that rank 0 has not seen " * 20)
        return load(*arguments)

    if os.environ.get("LOCAL_RANK") == "1":
        batches.load = grow_and_load
    sys.exit(cli.main(["train", *sys.argv[2:]]))
