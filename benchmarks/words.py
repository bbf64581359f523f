"""The command line of the benchmarks: `NAME key=value ...`, read as every command of longctx is.

A benchmark is a module with a dataclass `Options`, whose fields carry their meaning as `metadata`,
and a function `run`. One with TAKES_TRAINING_KEYS is given the overrides of train.py too.
"""

from __future__ import annotations

import importlib

from longctx import cli
from longctx.cli import check_backends, check_unused
from longctx.config.train_config import CompleteConfig, TrainConfig
from longctx.planner.overview import completed

__all__ = ["check_backends", "check_unused", "main", "request", "training_config"]

BENCHMARKS = {
    "attention": "forward and backward of every backend, in TFLOP/s and as ratios",
    "traffic": "bytes that attention moves through HBM, in closed form and as counted",
    "step": "where a training step's time goes, and what flash can gain at each length",
    "extension": "a small GPT extended with YaRN, and what it finds before and after",
    "context": "the longest context of every backend, with memory and speed up to it",
    "peers": "whole training steps beside nanoGPT, transformers, Liger and peft",
    "memory": "predicted peak memory beside the measured, over many configurations",
}


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` names; returns the exit code."""
    return cli.answer(argv or ["help"], lambda: help_text(argv), run)


def run(argv: list[str]) -> None:
    """Run the benchmark that `argv` names; ValueError for one that does not exist."""
    name, *arguments = argv
    if name not in BENCHMARKS:
        advice = "use longctx plan" if name == "plan" else f"choose one of {', '.join(BENCHMARKS)}"
        raise ValueError(f"{name} is not a benchmark; {advice}")
    module = importlib.import_module(f"benchmarks.{name}")
    command = " ".join(["python -m benchmarks", *argv])
    if getattr(module, "TAKES_TRAINING_KEYS", False):
        own, training = cli.split_own(module.Options, arguments)
        module.run(cli.options(module.Options, own), command, training)
    else:
        module.run(cli.options(module.Options, arguments), command)


def help_text(argv: list[str]) -> str:
    """List the benchmarks, or the keys of the one that `argv` names."""
    named = [name for name in BENCHMARKS if name in argv]
    if not named:
        lines = [f"  python -m benchmarks {name:<10} {BENCHMARKS[name]}" for name in BENCHMARKS]
        return "\n".join(["Measure, beside others in the same run.", "", *lines, "", MORE])
    module = importlib.import_module(f"benchmarks.{named[0]}")
    lines = [f"Measure {BENCHMARKS[named[0]]}.", "", *cli.key_lines(module.Options)]
    if getattr(module, "TAKES_TRAINING_KEYS", False):
        lines += ["", "And every key of longctx train --help."]
    return "\n".join(lines)


MORE = "Each takes key=value and --help. What fits, predicted without a GPU: longctx plan."


def request(overrides: list[str], device: str) -> TrainConfig:
    """Compose what the `overrides` of train.py ask for on "cuda" or "cpu"."""
    composed = cli.with_model(cli.compose("train", overrides), gpu=device == "cuda")
    config: TrainConfig = composed.config
    return config


def training_config(overrides: list[str], device: str) -> CompleteConfig:
    """Complete what the `overrides` of train.py ask for, see `completed`."""
    return completed(request(overrides, device), device)
