"""A training run whose corpus grows while it starts: process 1 adds a document before it opens any.

python tests/training/growing_run.py DOCUMENT devices=2 key=value ...
"""

import os
import sys
from pathlib import Path

from longctx import cli

if __name__ == "__main__":
    if os.environ.get("LOCAL_RANK") == "1":
        Path(sys.argv[1]).write_text("many words that rank 0 has not seen " * 20)
    sys.exit(cli.main(["train", *sys.argv[2:]]))
