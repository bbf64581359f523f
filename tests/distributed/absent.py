"""A training run whose process 1 ends before it has met the others: `absent.py how key=value ...`,
where `how` is "killed" or "exits".
"""

import os
import signal
import sys

from longctx import cli

if __name__ == "__main__":
    if os.environ.get("LOCAL_RANK") == "1":
        if sys.argv[1] == "exits":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(cli.main(["train", *sys.argv[2:]]))
