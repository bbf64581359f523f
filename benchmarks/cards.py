"""docs/cards.md: what fits which card by prediction, next to what was measured on real ones.

Predictions are those of `longctx plan`: the longest sequence with which a step fits, by memory=auto
and at 128 GiB of host memory, and the speed of sequences of 16,384 tokens. No GPU is needed.
results/caps.json confirms them, see caps.py; results/cards/ has the files of card.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.process_group import ROOT
from benchmarks.words import training_run
from longctx import files
from longctx.config.fields import key
from longctx.planner import fitting, overview, step_time
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload

if TYPE_CHECKING:
    from longctx.training.run import Run

CARDS = {24: "RTX 4090", 48: "L40S", 80: "H100", 141: "H200"}  # GB on the label → a card
MODELS = {  # name → overrides; 135m has the shape of SmolLM2-135M
    "135m": "vocab_size=49152 layers=30 channels=576 heads=9 kv_heads=3 ffn=1536",
    "1b": "",
    "8b": "",
}
WAYS = {  # how it is trained → overrides
    "all weights": [],
    "LoRA": ["lora.rank=16"],
    "LoRA on nf4": ["lora.rank=16", "lora.base=nf4"],
}
LENGTH = 16384  # at which speeds are compared
PAGE = ROOT / "docs" / "cards.md"
RESULTS = ROOT / "results"
Row = dict[str, Any]

HEAD = """# What fits your card

Written by `python -m benchmarks cards`. The first two tables are predicted, as by
`longctx plan model=1b gpu=L40S`: ask that for another model, card or precision. One GPU, bf16,
128 GiB of host memory, `attention=flash`, `memory=auto`, LoRA of rank 16. `135m` has SmolLM2's
shape; the others are presets.

The longest sequence that fits with 5% of the memory left free, as a run without dry runs leaves it,
each time by `memory=long`, and in parentheses its tokens/s if it is one document:
"""
SPEED = """
Tokens/s of sequences of 16,384 tokens, and the policy:
"""
CONFIRMED = """
## Tried under caps

`python -m benchmarks caps`: real steps in processes that get no more memory from torch than the
card has ({gpu}, torch {torch}, [caps.json](../results/caps.json)), at the lengths above. Documents
have 2,048 tokens: attention takes time by the document, memory by the sequence. Before GPU memory
came in segments that grow, two steps of `8b` ran out of memory here, with 4 and 9 GiB in gaps:
"""
CAME_IN = """
## Measured cards

`python -m benchmarks card` takes five minutes and writes `results/cards/NAME.json`. Send it in by a
pull request with the file and the page that `python -m benchmarks cards` makes of it. Training
steps of 16,384 tokens of `124m`, in tokens/s, the prediction in parentheses:
"""
ATTENTION = """
Attention alone, causal with heads of 128 and 16,384 tokens, forward and backward: TFLOP/s, and how
many times as fast as torch's FlashAttention-2:
"""


@dataclass(frozen=True)
class Options:
    """Where to write."""

    out: str = key(str(PAGE.relative_to(ROOT)), "the page")


class Case(NamedTuple):
    """A model and how it is trained."""

    model: str
    way: str

    @property
    def name(self) -> str:
        """The case in words."""
        return f"`{self.model}`, {self.way}"


CASES = [Case(model, way) for model in MODELS for way in ("all weights", "LoRA")]
CASES.append(Case("8b", "LoRA on nf4"))


def run(options: Options, command: str) -> None:
    """Write the page."""
    files.write_text(Path(options.out), page())
    print(f"wrote {options.out}")


def page() -> str:
    """Return the page, of predictions and of the files in results/."""
    longest = [
        {"trained": case.name} | {of(gb): longest_cell(case, gb) for gb in CARDS} for case in CASES
    ]
    speed = [
        {"trained": case.name} | {of(gb): speed_cell(case, gb) for gb in CARDS} for case in CASES
    ]
    parts = [HEAD, table(longest), SPEED, table(speed)]
    caps = RESULTS / "caps.json"
    if caps.exists():
        result = json.loads(caps.read_text())
        parts += [CONFIRMED.format(**result), table(map(confirmed, result["rows"]))]
    results = {path.name: json.loads(path.read_text()) for path in came_in()}
    parts.append(CAME_IN)
    parts.append(table(row for name, card in results.items() for row in step_rows(name, card)))
    if attention := [row for card in results.values() for row in attention_rows(card)]:
        parts += [ATTENTION, table(attention)]
    return "\n".join(parts) + "\n"


def came_in() -> list[Path]:
    """Return the files of measured cards."""
    return sorted((RESULTS / "cards").glob("*.json"))


def of(gb: int) -> str:
    """Return the head of a card's column."""
    return f"{gb} GB, {CARDS[gb]}"


def table(rows: Iterable[Row]) -> str:
    """Return Markdown of `rows`, or a line if there is none."""
    rows = list(rows)
    if not rows:
        return "None has come in yet."
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row.get(name, "")) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@cache
def run_of(case: Case) -> Run:
    """Return a run of `case` on any GPU, its policy open."""
    model = [f"model.{pair}" for pair in MODELS[case.model].split()]
    preset = "model=124m" if model else f"model={case.model}"
    overrides = [preset, *model, *WAYS[case.way], f"seq_len={LENGTH}", "workers=0"]
    return training_run(overrides, "cuda")


def longest_step(case: Case, gb: int) -> Workload | None:
    """Return the step of the longest sequence that is predicted to fit the card of `gb`."""
    chip = hardware.chip(CARDS[gb])
    return overview.longest_step([run_of(case).workload], chip, hardware.ASSUMED_HOST)


def longest_cell(case: Case, gb: int) -> str:
    """Return the longest sequence and its speed."""
    step = longest_step(case, gb)
    if step is None:
        return "none"
    assert step.memory.policy == "long"
    return f"{step.seq_len:,} ({speed_of(step, gb)})"


def speed_cell(case: Case, gb: int) -> str:
    """Return the speed of 16,384 tokens, and the policy."""
    chip = hardware.chip(CARDS[gb])
    step = fitting.decide(run_of(case).workload, chip, hardware.ASSUMED_HOST, merge=True)
    if not fitting.fits(step, fitting.room(chip), hardware.ASSUMED_HOST):
        return "does not fit"
    return f"{speed_of(step, gb)} (`{step.memory.policy}`)"


def speed_of(step: Workload, gb: int) -> str:
    """Return its predicted tokens per second."""
    time = step_time.seconds(step, hardware.chip(CARDS[gb]))
    assert time is not None
    return f"{time.tokens / time.total:,.0f}"


def confirmed(row: Row) -> Row:
    """Return a line of the table of steps under a cap."""
    measured = row["failed"] or f"{row['measured_gib']:.2f}"
    off = "" if row["error"] is None else f"{row['error']:+.1%}"
    line = {"trained": Case(row["model"], row["way"]).name, "tokens": f"{row['tokens']:,}"}
    line |= {"card": of(row["cap"]), "`memory=`": row["memory"]}
    return line | {
        "predicted, GiB": f"{row['predicted_gib']:.2f}",
        "measured": measured,
        "off": off,
    }


def step_rows(name: str, card: Row) -> list[Row]:
    """Return a line for each length of a measured card."""
    lines: dict[int, Row] = {}
    for row in card["steps"]:
        head = {"card": f"[{card['gpu']}](../results/cards/{name})", "torch": card["torch"]}
        line = lines.setdefault(row["tokens"], head | {"tokens": f"{row['tokens']:,}"})
        if row["failed"] is None:
            shown = f"{row['tokens_per_second']:,.0f}"
            line[f"`{row['backend']}`"] = f"{shown} ({predicted(card, row)})"
    return list(lines.values())


def predicted(card: Row, row: Row) -> str:
    """Return the tokens per second that are predicted for a measured step."""
    sizes = [f"seq_len={row['tokens']}", f"batch_size={row['batch']}", "accumulate=1"]
    given = [*card["overrides"], *sizes, f"attention={row['backend']}", f"memory={row['memory']}"]
    chip = hardware.chip(card["gpu"], card["memory_gib"] * GIB)
    time = step_time.seconds(training_run(given, "cuda").workload, chip)
    return "unknown card" if time is None else f"{time.tokens / time.total:,.0f}"


def attention_rows(card: Row) -> list[Row]:
    """Return one line of attention alone, if the card's file has that case."""
    case = {"mask": "causal", "head_size": 128, "tokens": LENGTH}
    found = [x for x in card["attention"] if case.items() <= x.items() and "skipped" not in x]
    cells = {
        f"`{x['backend']}`": f"{x['both_tflops']:.0f} ({x.get('both_ratio', 0):.2f} ×)"
        for x in found
    }
    return [{"card": card["gpu"], **cells}] if cells else []
