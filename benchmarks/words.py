"""The command line of the benchmarks: `NAME key=value ...`, read as every command of longctx is.

A benchmark is a module with a function `run` and a dataclass `Options`, whose fields carry their
meaning as `metadata`. One with TAKES_TRAINING_KEYS takes the overrides of train.py too.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterable, Mapping

from longctx import cli

BENCHMARKS = {
    "arena": "mixers trained on equal tokens: loss by position, speed, memory, on one page",
    "attention": "forward and backward of every backend, in TFLOP/s and as ratios",
    "cards": "docs/cards.md: what fits which card, predicted and measured; this card",
    "caps": "steps with no more memory than a card has, next to their prediction",
    "extension": "a real model that reads beyond its length, before and after YaRN and LoRA",
    "context": "the longest context of every backend, and memory and speed up to it",
    "steps": "whole training steps next to other trainers, on one GPU or several",
    "decoding": "the first token after a long prompt, and each further one",
    "tune": "launch configs of the kernels of flash on this GPU, for the table that training reads",
    "picture": "the picture of the README, drawn from results/",
    "reference": "docs/keys.md and docs/combinations.md, by asking the code",
    "models": "which models of transformers train here, and why others do not, for docs/models.md",
    "preferences": "DPO at length next to TRL",
}


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` names; return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a file shows each line at once, too
    return cli.commands.answer(argv or ["help"], help_text, run)


def run(argv: list[str]) -> None:
    """Run the benchmark that `argv` names; ValueError for one that does not exist."""
    name, *arguments = argv
    if name not in BENCHMARKS:
        advice = "use longctx plan" if name == "plan" else f"choose one of {', '.join(BENCHMARKS)}"
        raise ValueError(f"{name} is not a benchmark; {advice}")
    module = importlib.import_module(f"benchmarks.{name}")
    command = " ".join(["python -m benchmarks", *argv])
    if getattr(module, "TAKES_TRAINING_KEYS", False):
        own, training = cli.parse.split_own(module.Options, arguments)
        module.run(cli.compose(module.Options, own).config, command, training)
    else:
        module.run(cli.compose(module.Options, arguments).config, command)


def help_text(argv: list[str]) -> str:
    """List the benchmarks, or the keys of the one that `argv` names."""
    named = [name for name in BENCHMARKS if name in argv]
    if not named:
        lines = [f"  python -m benchmarks {name:<16} {BENCHMARKS[name]}" for name in BENCHMARKS]
        return "\n".join(["Measure, next to others in the same run.", "", *lines, "", MORE])
    module = importlib.import_module(f"benchmarks.{named[0]}")
    lines = [f"Measure {BENCHMARKS[named[0]]}.", "", *cli.commands.key_lines(module.Options)]
    if getattr(module, "TAKES_TRAINING_KEYS", False):
        lines += ["", "And every key of longctx train --help."]
    return "\n".join(lines)


MORE = "Each takes key=value and --help. What fits, predicted without a GPU: longctx plan."


def check_unused(arguments: Iterable[str], set_here: Mapping[str, str]) -> None:
    """Raise ValueError for an argument whose key is in `set_here`: key → what to use instead."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in set_here:
            raise ValueError(f"{argument}: is set for each point; {set_here[name]}")
