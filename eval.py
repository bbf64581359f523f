"""Evaluate a run or a Hugging Face folder: `python eval.py checkpoint=runs/NAME seq_len=16384`;
every key: `--help`. The same as `longctx eval`.
"""

import sys

from longctx import cli


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 a mistake in the request (one line on stderr), 74 a full disk, 130
    stopped by Ctrl-C.
    """
    return cli.main(["eval", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
