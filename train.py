"""Train a GPT: `python train.py attention=flash seq_len=16384`; every key: `python train.py --help`.

torch is imported only once the command line is known to make sense.
"""

import os
import sys
import traceback


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 1 the run failed, 2 a mistake in what was asked (one line on stderr), 130 or 143 stopped by a signal."""
    from longctx import config

    try:
        words = config.read_words("train", argv)
        if words.help:
            print(config.help_text("train"))
            return 0
        if words.sweep:
            from longctx.training.sweep import sweep

            return sweep(__file__, config.jobs(words.overrides))
        return train(words.overrides)
    except (ValueError, OSError) as error:
        return failed(error, 2)
    except KeyboardInterrupt:
        return 130


def train(overrides: list[str]) -> int:
    """One run in this process."""
    from longctx import config

    composed = config.compose("train", overrides)
    print(composed)
    return 0


def failed(error: Exception, code: int) -> int:
    """Say in one line what went wrong; with LONGCTX_TRACEBACK=1 also where."""
    if os.environ.get("LONGCTX_TRACEBACK"):
        traceback.print_exception(error)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
