"""Train a GPT: `python train.py attention=flash seq_len=16384`; every key: `python train.py
--help`. The same as `longctx train`.
"""

import sys

from longctx import system

if __name__ == "__main__":
    system.catch_first()

from longctx import cli


def main(argv: list[str]) -> int:
    """Return the exit code: 0 done, 1 the run failed, 2 a mistake (one line on stderr), 74 a full
    disk, 128 + N stopped by signal N.
    """
    return cli.main(["train", *argv])


if __name__ == "__main__":
    system.exit_with(main(sys.argv[1:]))
