"""The command line of the benchmarks: `NAME key=value ...`, checked against the options dataclass
of each.

A benchmark is a module with a dataclass `Options`, whose fields carry their meaning as `metadata`,
and a function `run`. One with TAKES_TRAINING_KEYS is given the words of train.py too.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from longctx import cli
from longctx.options import answer, help_lines, read

if TYPE_CHECKING:
    from longctx.config.train_config import CompleteConfig, TrainConfig

MODULES = {"plan": "longctx.planner.overview"}
BENCHMARKS = {
    "attention": "forward and backward of every backend, in TFLOP/s and as ratios",
    "traffic": "bytes that attention moves through HBM, in closed form and as the hardware counts them",
    "step": "where a training step's time goes, and what flash can gain at each length",
    "extension": "a small GPT pretrained at a short length, extended with YaRN, and what it finds before and after",
    "plan": "memory and time of a configuration, and the longest context that fits, predicted without a GPU",
    "context": "the longest context of every backend, and memory and speed at each length up to it",
    "peers": "whole training steps beside other trainers': nanoGPT, transformers, Liger, peft",
    "memory": "predicted peak memory beside the measured, over many configurations",
    "optimizers": "tokens to the same validation loss with each optimizer, each tuned alike",
}


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` names; 0, or 2 after one line on stderr."""
    return answer(argv or ["help"], lambda: help_text(argv), run)


def run(argv: list[str]) -> None:
    """The benchmark that `argv` names; ValueError for one that does not exist."""
    name, *words = argv
    if name not in BENCHMARKS:
        raise ValueError(f"{name} is not a benchmark; choose one of {', '.join(BENCHMARKS)}")
    module = importlib.import_module(MODULES.get(name, f"benchmarks.{name}"))
    command = " ".join(["python -m benchmarks", *argv])
    if getattr(module, "TAKES_TRAINING_KEYS", False):
        own = {field.name for field in dataclasses.fields(module.Options)}
        mine = [word for word in words if word.partition("=")[0] in own]
        others = cli.read_words("train", [word for word in words if word not in mine]).overrides
        module.run(read(module.Options, mine), command, others)
    else:
        module.run(read(module.Options, words), command)


def help_text(argv: list[str]) -> str:
    """What there is to measure, and each key with its default and meaning; of one benchmark where
    `argv` names it.
    """
    lines = ["Measure, beside peers in the same run.", ""]
    for name in [name for name in BENCHMARKS if name in argv] or BENCHMARKS:
        lines.append(f"  python -m benchmarks {name}    {BENCHMARKS[name]}")
        module = importlib.import_module(MODULES.get(name, f"benchmarks.{name}"))
        lines += help_lines(module.Options)
        if getattr(module, "TAKES_TRAINING_KEYS", False):
            lines.append("      and the keys of python train.py --help")
    return "\n".join(lines)


def check_unused(words: Iterable[str], taken: Mapping[str, str]) -> None:
    """ValueError for one of the `words` of train.py that a benchmark sets itself: key → what to use
    instead.
    """
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if key in taken:
            raise ValueError(f"{word.lstrip('+')}: is set for each point; {taken[key]}")


def check_backends(names: Iterable[str]) -> None:
    """ValueError for one that attention= does not have."""
    known = cli.presets("attention")
    for name in names:
        if name not in known:
            raise ValueError(f"backends={name}: choose from {', '.join(sorted(known))}")


def request(words: list[str], device: str) -> TrainConfig:
    """What the `words` of train.py ask for on "cuda" or "cpu"."""
    asked: TrainConfig = cli.compose("train", words, gpu=device == "cuda").config
    return asked


def training_config(words: list[str], device: str) -> CompleteConfig:
    """The configuration of a run with the `words` of train.py on "cuda" or "cpu", see `filled`."""
    return filled(request(words, device), device)


def filled(asked: TrainConfig, device: str) -> CompleteConfig:
    """The configuration of a run on "cuda" or "cpu", nothing left open but memory=auto on a GPU.

    Without a corpus there is no tokenizer: where the vocabulary is open, it is what data.vocab_size
    asks for. ValueError for words about weights that are there already.
    """
    from longctx.config.train_config import complete

    for key in ("init", "resume"):
        if getattr(asked, key) is not None:
            raise ValueError(
                f"{key}={getattr(asked, key)}: benchmarks take random weights; describe the model by model="
            )
    made = complete(asked, device)
    made.model.vocab_size = made.model.vocab_size or -(-made.data.vocab_size // 64) * 64
    made.memory = asked.memory if device == "cuda" else made.memory
    return made
