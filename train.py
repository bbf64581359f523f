"""Train a GPT: `python train.py attention=flash seq_len=16384`; every key: `python train.py
--help`.

torch is imported only once the command line is known to make sense.
"""

import sys

from longctx import cli
from longctx.config.request import Request


def main(argv: list[str]) -> int:
    """Return the exit code: 0 done, 1 the run failed, 2 a mistake (one line on stderr), 130 or 143
    stopped by a signal.
    """
    return cli.run(
        "train", argv, lambda request: (sweep if request.sweep else train)(request.overrides)
    )


def train(overrides: list[str]) -> int:
    """One run in this process."""
    request = Request(*(resumed(overrides) or cli.compose("train", overrides)))
    with cli.libraries():
        from longctx.training.loop import train
    return train(request)


def resumed(overrides: list[str]) -> cli.Composed | None:
    """Read the configuration of the run that resume= names and apply the other overrides; None for
    a new run.
    """
    from longctx.runs import run_folder

    paths = [
        cli.unquoted(override.removeprefix("resume="))
        for override in overrides
        if override.startswith("resume=")
    ]
    if not paths or paths[-1] in ("", "null"):
        return None
    others = [override for override in overrides if not override.startswith("resume=")]
    folder = run_folder.find(paths[-1])
    run_folder.check_resumable(folder, others)
    composed = cli.from_file("train", folder / "config.yaml", others)
    composed.config.resume = str(folder)
    return composed


def sweep(overrides: list[str]) -> int:
    """Train every combination of the choices in `overrides`, once all of them are checked."""
    jobs = cli.jobs("train", overrides)
    for override in overrides:
        if override.startswith(("resume=", "name=")) and len(jobs) > 1:
            raise ValueError(
                f"{override}: each job of a sweep is a new run with a name of its own; leave it out"
            )
    for job in jobs:
        cli.compose("train", job)
    from longctx.training.sweep import sweep as run

    return run(__file__, jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
