"""A training run whose process 1 is killed before it has met the others.

python tests/parallel/absent.py devices=2 key=value ...
"""

import os
import signal
import sys

from longctx import cli

if __name__ == "__main__":
    if os.environ.get("LOCAL_RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(cli.main(["train", *sys.argv[1:]]))
