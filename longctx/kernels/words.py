"""The command line of the kernels: `show key=value ...` and `tune key=value ...`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from longctx.options import answer, help_lines, read


@dataclass(frozen=True)
class ShowOptions:
    """What to ask for."""

    kernel: str = field(
        default="auto",
        metadata={
            "help": "auto: what training takes | portable | hopper; a CPU has one of its own"
        },
    )
    head_size: int = field(default=64, metadata={"help": "head size"})
    seq_len: int = field(default=4096, metadata={"help": "tokens in a row"})
    dtype: str = field(
        default="auto", metadata={"help": "auto: bf16 on a GPU, fp32 on a CPU | bf16 | fp16 | fp32"}
    )


@dataclass(frozen=True)
class TuneOptions:
    """What to measure."""

    kernels: tuple[str, ...] = field(
        default=("portable", "hopper"), metadata={"help": "portable | hopper, where it runs"}
    )
    head_sizes: tuple[int, ...] = field(
        default=(64, 128),
        metadata={"help": "head sizes; a table serves up to the next power of two"},
    )
    lengths: tuple[int, ...] = field(
        default=(4096, 16384),
        metadata={
            "help": "tokens in a row; a config serves from halfway (geometrically) to the length before"
        },
    )
    dtype: str = field(default="bf16", metadata={"help": "bf16 | fp16; the table serves both"})
    channels: int = field(default=2048, metadata={"help": "query heads × head size"})
    row_tokens: int = field(default=16384, metadata={"help": "batch × length, up to that length"})
    out: str = field(
        default="", metadata={"help": "the table; empty: where training looks, see launch.py"}
    )


COMMANDS: dict[str, tuple[str, type[Any]]] = {
    "show": (
        "what runs here, tested and written down as the lock of a run has it, as JSON",
        ShowOptions,
    ),
    "tune": ("measure launch configs on this GPU and write the table of the best", TuneOptions),
}


def main(argv: list[str]) -> int:
    """Do what `argv` says; 0, or 2 after one line on stderr."""
    return answer(argv or ["help"], help_text, run)


def run(argv: list[str]) -> None:
    """The command that `argv` names; ValueError for one that does not exist."""
    name, *words = argv
    if name not in COMMANDS:
        raise ValueError(f"{name} is not a command; choose show or tune")
    options = read(COMMANDS[name][1], words)
    importlib.import_module(f"longctx.kernels.{name}").run(
        options, " ".join(["python -m longctx.kernels", *argv])
    )


def help_text() -> str:
    """The commands, and each key with its default and meaning."""
    lines = ["The kernels of attention=flash.", ""]
    for name, (meaning, options) in COMMANDS.items():
        lines += [f"  python -m longctx.kernels {name}    {meaning}", *help_lines(options)]
    return "\n".join(lines)
