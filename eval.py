"""Evaluate a run or a Hugging Face folder: `python eval.py checkpoint=runs/NAME seq_len=16384`;
every key: `--help`.

torch is imported only once the command line is known to make sense.
"""

import sys

from longctx import cli
from longctx.config.eval_config import EvalRequest


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 a mistake in the request (one line on stderr), 130 stopped by Ctrl-C."""
    return cli.run("eval", argv, evaluate)


def evaluate(words: cli.Arguments) -> int:
    """Run the evaluation of the command line, print its tables, write its files."""
    if words.sweep:
        raise ValueError("-m: eval.py does one evaluation at a time; call it once for each")
    composed = cli.compose("eval", words.overrides)
    command = [__file__, *words.overrides]
    request = EvalRequest.of(composed.config, composed.changed, command)
    with cli.libraries():
        from longctx.evaluation.measure import measure
        from longctx.evaluation.results import save
        from longctx.evaluation.setup import resolve

    setup = resolve(request)
    result = measure(setup)
    if result is not None:
        result.show(result.content)
        print(save(result, setup))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
