"""docs/cards.md: what fits which card by prediction, next to what was measured on real ones.

    python -m benchmarks cards                  the page
    python -m benchmarks cards measure=true     this card, in five minutes: a file to send in

Predictions are those of `longctx plan`: the longest sequence with which a step fits, by memory=auto
and with 64, 128 and 256 GiB of host memory, and the speed of sequences of 16,384 tokens. No GPU is
needed. A card's file has attention forward and backward next to torch's FlashAttention-2, and steps
of `124m` with every backend that runs.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import attention
from benchmarks.points import Row, decided, expected, off, point, this_gpu, training_run
from benchmarks.processes import ROOT
from benchmarks.report import machine, table, write_json
from benchmarks.shapes import SHAPES
from benchmarks.words import check_unused
from longctx import files
from longctx.config.fields import Group, key
from longctx.planner import fitting, overview, step_time
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.training.run import Run

TAKES_TRAINING_KEYS = True
TAKEN = {"seq_len": "use lengths=", "attention": "every backend is tried", "batch_size": "tokens="}
CARDS = {8: "RTX 4060", 12: "RTX 3060", 16: "RTX 4080", 24: "RTX 4090", 40: "A100 40GB"}
CARDS |= {48: "L40S", 80: "H100", 141: "H200"}  # GB on the label → a card
SHOWN = (24, 48, 80, 141)
HOSTS = (64, 128, 256)  # GiB of host memory
MODELS = {  # name → overrides; a name among SHAPES has none
    "135m": "vocab_size=49152 layers=30 channels=576 heads=9 kv_heads=3 ffn=1536",
    "1b": "",
    "8b": "",
    "70b": "vocab_size=128256 layers=80 channels=8192 heads=64 kv_heads=8 ffn=28672 tied=false",
    "gpt-oss-20b": "",
}
WAYS = {  # how it is trained → overrides
    "all weights": [],
    "LoRA": ["lora.rank=16"],
    "LoRA on nf4": ["lora.rank=16", "lora.base=nf4"],
}
# Of Llama 3.1 8B and 3.3 70B by QLoRA of rank 32: model → GB of a card → tokens of Unsloth, and of
# transformers with FlashAttention-2
PUBLISHED = {
    "8b": {8: (2972, None), 12: (21848, 932), 16: (40724, 2551), 24: (78475, 5789)}
    | {40: (153977, 12264), 48: (191728, 15502), 80: (342733, 28454)},
    "70b": {48: (12106, None), 80: (89389, 6916)},
}
LENGTH = 16384  # at which speeds are compared
PEERS = ("flash", "sdpa-flash", "sdpa-cudnn", "flex")
PEERS += tuple(f"flash-attention-{version}" for version in (4, 3, 2))
# Backends of steps, the ones that matter most first: time may run short
ORDER = ("flash", "sdpa", "flash_attn", "flex", "naive")
STATE = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu")
PAGE = ROOT / "docs" / "cards.md"
RESULTS = ROOT / "results"

HEAD = """# What fits your card

Written by `python -m benchmarks cards`. The first three tables are predicted, as by
`longctx plan model=8b lora.rank=16 lora.base=nf4 gpu=rtx4090 host_memory=64`: ask that for another
model, card or precision. One GPU, bf16, `attention=flash`, `memory=auto`; 5% of the GPU's memory,
0.4 GiB at least, and 12 GiB of the host's are left free. Measured are
[steps under caps](#tried-under-caps), and steps with [weights on the host](memory.md#as-measured).

The longest sequence, in tokens, of LoRA on nf4 by host memory, next to what
[Unsloth publishes](https://unsloth.ai/docs/basics/unsloth-benchmarks) (read on 2026-11-28; measured
by them on their cards, Llama 3.1 8B and 3.3 70B). Rank 32, one sequence per step:
"""
LONGEST = """
The same for other models and ways to train, LoRA of rank 16, and in parentheses predicted tokens/s
if the sequence is one document. A star: a step [was measured](#tried-under-caps), mostly of few
layers. `135m` has SmolLM2's shape, `70b` Llama's; LoRA of `gpt-oss-20b` adapts experts too:
"""
SPEED = """
Predicted tokens/s with sequences of 16,384 tokens and 128 GiB of host memory, and the policy that
the settings begin with:
"""
CONFIRMED = """
## Tried under caps

`python -m benchmarks caps`: real steps with no more memory from torch than the card has ({gpu},
torch {torch}, [caps.json](../results/caps.json)), at lengths above, rounded down to whole tiles.
Documents have 2,048 tokens: attention takes time by the document, memory by the sequence. Steps of
fewer layers have the settings of the whole model, and the cap is lower by what the other layers are
predicted to take. The host's memory is a prediction.
"""
RANDOM_TRIED = """
Of {count} models of 2 to 4 layers, with random parts, settings and a cap of 3 to 11 GiB, at the
longest sequence predicted to fit, {fit} took two steps and a batch of validation, {out} ran out of
memory. The median error of the predictions was {middle:.1%}, the largest {worst:.1%}."""
CAME_IN = """
## Measured cards

`python -m benchmarks cards measure=true` takes five minutes and writes `results/cards/NAME.json`.
To send it in, open a pull request with it and the page that `python -m benchmarks cards` writes.
Training steps of 16,384 tokens of `124m`, in tokens/s, the prediction in parentheses:
"""
ATTENTION = """
Attention alone, causal with heads of 128 and 16,384 tokens, forward and backward: TFLOP/s, and how
many times as fast as torch's FlashAttention-2:
"""


@dataclass(frozen=True)
class Options(Group):
    """What to do; keys of train.py may follow and hold for the steps of measure=true."""

    measure: bool = key(False, "measure this card")
    lengths: tuple[int, ...] = key((4096, 16384), "tokens of a sequence")
    tokens: int = key(16384, "of all sequences together, if they are shorter")
    minutes: float = key(5.0, "for everything, about; steps not begun by then are left out")
    out: str = key("", "the page, or the folder of the card's file")


class Case(NamedTuple):
    """A model and how it is trained."""

    model: str
    way: str

    @property
    def name(self) -> str:
        """The case in words."""
        return f"`{self.model}`, {self.way}"


CASES = [Case(model, way) for model in ("135m", "1b", "8b") for way in ("all weights", "LoRA")]
CASES += [Case("8b", "LoRA on nf4"), Case("70b", "LoRA on nf4")]
CASES += [Case("gpt-oss-20b", "LoRA"), Case("gpt-oss-20b", "LoRA on nf4")]


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Write the page, or what it is made of."""
    check_unused(overrides, TAKEN)
    if options.measure:
        measure(options, command, overrides)
    else:
        out = Path(options.out or PAGE)
        files.write_text(out, page())
        print(f"wrote {out}")


# The page


def page() -> str:
    """Return the page, of predictions and of the files in results/."""
    longest = [
        {"trained": case.name, "card": of(gb)}
        | {f"{host} GiB of host": longest_cell(case, gb, host) for host in HOSTS}
        for case, gb in itertools.product(CASES, SHOWN)
    ]
    speed = [{"trained": x.name} | {of(gb): speed_cell(x, gb) for gb in SHOWN} for x in CASES]
    caps = json.loads((RESULTS / "caps.json").read_text())
    tried = [confirmed(row) for case in CASES for row in stepped(*case)]
    parts = [HEAD, table(published()), LONGEST, table(longest), SPEED, table(speed)]
    parts += [CONFIRMED.format(**caps), table(tried)]
    rows = [x for x in caps["rows"] if "cap" not in x]
    errors = sorted(abs(row["error"]) for row in rows if not row["failed"])
    count = {"count": len(rows), "fit": len(errors), "out": len(rows) - len(errors)}
    parts += [RANDOM_TRIED.format(**count, middle=median(errors), worst=errors[-1])]
    came_in = sorted((RESULTS / "cards").glob("*.json"))
    cards = {path.name: json.loads(path.read_text()) for path in came_in}
    steps = (row for name, card in cards.items() for row in step_rows(name, card))
    parts += [CAME_IN, table(steps)]
    parts += [ATTENTION, table(row for card in cards.values() for row in attention_rows(card))]
    return "\n".join(parts) + "\n"


def published() -> Iterator[Row]:
    """Yield a line for each length that Unsloth publishes, with ours."""
    for model, by_card in PUBLISHED.items():
        for gb, (unsloth, usual) in by_card.items():
            line = {"model": f"`{model}`", "card": of(gb)}
            line |= {"transformers, FlashAttention-2": f"{usual:,}" if usual else "none"}
            line |= {"Unsloth": f"{unsloth:,}"}
            for host in HOSTS:
                x = longest_of_rank_32(model, gb, host)
                line[f"longctx, {host} GiB of host"] = f"{x.seq_len:,}" if x else "none"
            yield line


def longest_of_rank_32(model: str, gb: int, host: float) -> Workload | None:
    """Return the step of the longest sequence of `model` as in PUBLISHED."""
    step = run_of(Case(model, "LoRA on nf4")).workload
    return longest_step(replace(step, lora=replace(step.lora, rank=32)), gb, host)


def of(gb: int) -> str:
    """Return the head of a card's column."""
    return f"{gb} GB, {CARDS[gb]}"


@cache
def run_of(case: Case, layers: int = 0) -> Run:
    """Return a run of `case`, or its first `layers`, on any GPU, its policy open."""
    model, shape = [f"model.{pair}" for pair in MODELS[case.model].split()], SHAPES.get(case.model)
    preset = [] if shape else ["model=124m" if model else f"model={case.model}"]
    if shape and layers:
        shape = shape | {"num_hidden_layers": layers, "layer_types": shape["layer_types"][:layers]}
    elif layers:
        model = [*(x for x in model if not x.startswith("model.layers")), f"model.layers={layers}"]
    overrides = [*preset, *model, *WAYS[case.way], f"seq_len={LENGTH}", "workers=0"]
    return training_run(overrides, "cuda", shape)


def longest_step(step: Workload, gb: int, host: float = 128) -> Workload | None:
    """Return `step` with the longest sequence that is predicted to fit the card of `gb`, in a
    machine with `host` GiB.
    """
    return overview.longest_step([step], hardware.chip(CARDS[gb]), host * GIB)


def longest_cell(case: Case, gb: int, host: float) -> str:
    """Return the longest sequence, a mark if it was stepped, and its speed."""
    step = longest_step(run_of(case).workload, gb, host)
    if step is None:
        return "none"
    tile = step.memory.mlp_tile or 1  # steps under caps have whole ones
    beyond = [step.seq_len - x["tokens"] for x in stepped(*case) if x["cap"] == gb]
    star = " *" * any(0 <= tokens < tile for tokens in beyond)
    return f"{step.seq_len:,}{star} ({speed_of(step, hardware.chip(CARDS[gb]))})"


def speed_cell(case: Case, gb: int) -> str:
    """Return the speed of 16,384 tokens, and the policy."""
    chip = hardware.chip(CARDS[gb])
    step = fitting.decide(run_of(case).workload, chip, hardware.ASSUMED_HOST, merge=True)
    if not fitting.fits(step, fitting.room(chip), hardware.ASSUMED_HOST):
        return "does not fit"
    return f"{speed_of(step, chip)} (`{step.memory.policy}`)"


def speed_of(step: Workload, chip: hardware.Chip) -> str:
    """Return its predicted tokens per second."""
    time = step_time.seconds(step, chip)
    return "unknown card" if time is None else f"{time.tokens / time.total:,.0f}"


def stepped(model: str, way: str) -> list[Row]:
    """Return the steps of a case under caps."""
    rows = json.loads((RESULTS / "caps.json").read_text())["rows"]
    return [row for row in rows if (row.get("model"), row.get("way")) == (model, way)]


def confirmed(row: Row) -> Row:
    """Return a line of the table of steps under a cap."""
    model = run_of(Case(row["model"], row["way"])).workload.model
    return {
        "trained": Case(row["model"], row["way"]).name,
        "layers": f"{row['layers'] or model.layers} of {model.layers}",
        "card, host": f"{row['cap']} GB, {row['host']} GiB",
        "tokens": f"{row['tokens']:,}",
        "`memory=`": f"`{row['memory'].replace('memory.', '')}`",
        "on the host, GiB": f"{row['host_gib']:.0f}",
        "predicted, GiB": f"{row['predicted_gib']:.2f}",
        "measured": row["failed"] or f"{row['measured_gib']:.2f}",
        "off": off(row["error"]),
    }


def step_rows(name: str, card: Row) -> list[Row]:
    """Return a line for each length of a measured card, each speed with its prediction."""
    lines: dict[int, Row] = {}
    chip = hardware.chip(card["gpu"], card["memory_gib"] * GIB)
    for row in card["steps"]:
        head = {"card": f"[{card['gpu']}](../results/cards/{name})", "torch": card["torch"]}
        line = lines.setdefault(row["tokens"], head | {"tokens": f"{row['tokens']:,}"})
        if row["failed"] is None:
            given = [f"seq_len={row['tokens']}", f"batch_size={row['batch']}", "accumulate=1"]
            given += [f"attention={row['backend']}", *f"memory={row['memory']}".split()]
            step = training_run([*card["overrides"], *given], "cuda").workload
            cell = f"{row['tokens_per_second']:,.0f} ({speed_of(step, chip)})"
            line[f"`{row['backend']}`"] = cell
    return list(lines.values())


def attention_rows(card: Row) -> Iterator[Row]:
    """Yield a line of attention alone, if the card's file has that case."""
    case = {"mask": "causal", "head_size": 128, "tokens": LENGTH}
    found = [x for x in card["attention"] if case.items() <= x.items() and "skipped" not in x]
    cells = {
        f"`{x['backend']}`": f"{x['both_tflops']:.0f} ({x.get('both_ratio', 0):.2f} ×)"
        for x in found
    }
    if cells:
        yield {"card": card["gpu"], **cells}


# This card


def measure(options: Options, command: str, overrides: list[str]) -> None:
    """Measure attention, then steps; write the card's file after each point."""
    import torch

    from longctx.parallel.devices import able_backends

    device = "cuda" if torch.cuda.is_available() else "cpu"
    end, about, gpu = time.monotonic() + 60 * options.minutes, machine() | state(), this_gpu()
    slug = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    path = Path(options.out or RESULTS / "cards") / f"{slug}.json"
    if not any(override.startswith("model=") for override in overrides):
        overrides = ["model=124m", *overrides]
    result: Row = {"command": command, **about, "memory_gib": gpu.memory / GIB if gpu else 0.0}
    result |= {"options": asdict(options), "overrides": overrides, "attention": [], "steps": []}
    if device == "cuda":  # two fifths of the time; most of the rest is compiling steps
        seconds = int(24 * options.minutes)
        chosen = attention.Options(
            options.lengths, backends=PEERS, row_tokens=options.tokens, seconds=seconds, repeats=20
        )
        for case in (("causal",), ("documents", "window")):
            chosen = replace(chosen, masks=case, seconds=seconds // 2)
            result["attention"] += attention.rows_of(chosen, attention.matmul_tflops())
            write_json(path, result)
    for length in options.lengths:
        batch_size = max(1, options.tokens // length)
        given = [*overrides, f"seq_len={length}", f"batch_size={batch_size}", "accumulate=1"]
        run = training_run(given, device)
        able = able_backends(run.config, run.workload.model, device)
        for backend in (name for name in ORDER if name in able):
            if time.monotonic() > end:
                print(f"left out: {backend} with {length:,} tokens; give more minutes=")
                continue
            run = decided(training_run([*given, f"attention={backend}"], device))
            row = expected(run)
            if gpu is not None and row["predicted_gib"] * GIB > gpu.usable:
                row["failed"] = f"predicted to take {row['predicted_gib']:.0f} GiB"
            else:
                row = point(run, 2, 6)
            result["steps"].append(row | {"batch": batch_size})
            print(f"{backend}, {length:,} tokens: {row['failed'] or row['tokens_per_second']}")
            write_json(path, result)
    shown = ("tokens", "backend", "kernel", "memory", "spread", "tokens_per_second", "failed")
    grid("Training steps", shown, result["steps"])
    print(f"wrote {path}")


def state() -> dict[str, str]:
    """Return the driver, clocks and power limit of the card, as far as nvidia-smi tells them."""
    query = ["nvidia-smi", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # AMD, or a CPU
        return {}
    return dict(zip(STATE, (value.strip() for value in answer.split(",")), strict=False))
