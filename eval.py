"""Evaluate a run or a Hugging Face folder: `python eval.py checkpoint=runs/NAME seq_len=16384`;
every key: `--help`. The same as `longctx eval`.
"""

import sys

from longctx import system

if __name__ == "__main__":
    system.catch_first()

from longctx import cli


def main(argv: list[str]) -> int:
    """Return the exit code, with the meanings of train.py."""
    return cli.main(["eval", *argv])


if __name__ == "__main__":
    system.exit_with(main(sys.argv[1:]))
