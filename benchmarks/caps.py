"""Real steps at the longest lengths of docs/cards.md, in processes with no more memory than a card.

Each point is a child process in which torch's allocator gets the memory of a 24, 48 or 80 GB card,
less what CUDA itself takes. It takes one step on packed documents and a batch of validation. Small
points run next to one another: unlike time, memory does not change with company.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import cards
from benchmarks.memory import CONTEXT, DOCUMENT, Room, off
from benchmarks.preferences import capped
from benchmarks.process_group import in_child
from benchmarks.report import machine, write_json
from longctx.config.fields import key
from longctx.planner.peak_memory import predict
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.training.dry_run import DryRun
    from longctx.training.run import Run

OF_CUDA = 0.8  # GiB of a card that torch's allocator never gets: context and libraries
SHOWN = ("model", "way", "cap", "tokens", "memory", "predicted_gib", "measured_gib", "off")
SHOWN += ("reserved_gib", "seconds", "failed")
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What to confirm."""

    caps: tuple[int, ...] = key((24, 48, 80), "GB on the label of a card of docs/cards.md")
    models: tuple[str, ...] = key(tuple(cards.MODELS), "models", choices=cards.MODELS)
    steps: int = key(1, "of each point", between=(1, 10))
    parallel: int = key(3, "processes at a time, as far as their caps fit together")
    minutes: float = key(6.0, "points not begun by then are left out")
    out: str = key("results/caps", "writes .json")


def run(options: Options, command: str) -> None:
    """Measure every point, print predicted and measured peaks, write `out`.json after each."""
    import torch

    if unknown := [cap for cap in options.caps if cap not in cards.CARDS]:
        raise ValueError(f"caps={unknown[0]}: choose from {', '.join(map(str, cards.CARDS))}")
    if not torch.cuda.is_available():
        raise ValueError("caps: measures a GPU's memory, and there is no CUDA GPU here")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each process
    rows: list[Row] = []
    # By a child: torch would take memory of the GPU for this process
    result: Row = {
        "command": command,
        **in_child(machine),
        "options": asdict(options),
        "rows": rows,
    }
    end = time.monotonic() + 60 * options.minutes
    there = hardware.here()
    assert there is not None
    room = Room(there.memory)
    with ThreadPoolExecutor(options.parallel) as threads:
        for row in threads.map(
            lambda each: point(*each, options.steps, end, room), points(options)
        ):
            rows += [row] if row else []
            write_json(Path(f"{options.out}.json"), result)
    grid("Steps under caps", SHOWN, [row | {"off": off(row["error"])} for row in rows])
    print(f"wrote {options.out}.json")


def points(options: Options) -> list[tuple[cards.Case, int, Workload]]:
    """Return case, cap and step of every point; those with the last cap, which fill a GPU, last."""
    of_caps = [list(points_under(cap, options)) for cap in options.caps]
    mixed = itertools.chain.from_iterable(itertools.zip_longest(*of_caps[:-1]))
    return [each for each in mixed if each is not None] + of_caps[-1]


def points_under(cap: int, options: Options) -> Iterator[tuple[cards.Case, int, Workload]]:
    """Yield the points of a cap: an 8b model by LoRA, on nf4 under the smallest."""
    way = "LoRA on nf4" if cap == min(cards.CARDS) else "LoRA"
    # The models that take longest come first: time may run short
    for case in reversed(cards.CASES):
        if case.model not in options.models or (case.model == "8b" and case.way != way):
            continue
        if (step := cards.longest_step(case, cap)) is not None:
            yield case, cap, step


def point(
    case: cards.Case, cap: int, step: Workload, steps: int, end: float, room: Room
) -> Row | None:
    """Return prediction and measurement of a step; None if the clock is past `end`."""
    gib = hardware.CHIPS[cards.CARDS[cap]].memory / GIB - OF_CUDA
    training = replace(cards.run_of(case), workload=step, val_rows=1)
    with room.reserved(gib * GIB + CONTEXT):
        began = time.monotonic()
        if began > end:
            print(f"left out: {case.name} under {cap} GB; give more minutes=", flush=True)
            return None
        row = answered(training, steps, gib)
    predicted = predict(step)
    measured = row["measured_gib"]
    row |= {
        **{"model": case.model, "way": case.way, "cap": cap, "cap_gib": gib},
        **{"tokens": step.seq_len, "memory": step.memory.policy},
        "predicted_gib": predicted.peak / GIB,
        "host_gib": sum(predicted.host.values()) / GIB,
        "error": predicted.peak / GIB / measured - 1 if measured and not row["failed"] else None,
        "seconds": time.monotonic() - began,
    }
    print(f"{case.name} under {cap} GB: {off(row['error']) or row['failed']}", flush=True)
    return row


def answered(training: Run, steps: int, gib: float) -> Row:
    """Return what a child process measures, or why it fails."""
    try:
        found = in_child(stepped_here, training, steps, gib)
    except (BrokenProcessPool, ValueError, RuntimeError) as error:  # killed, or a kernel fails
        line = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return {"measured_gib": None, "reserved_gib": None, "failed": line}
    return {
        "measured_gib": found.memory.get("memory_peak_gib"),
        "reserved_gib": found.memory.get("memory_reserved_gib"),
        "kernels": found.kernels,
        "ms": found.ms,
        "failed": found.failed,
    }


def stepped_here(training: Run, steps: int, gib: float) -> DryRun:
    """Return `steps` steps and a validation, in this process."""
    from longctx.training.dry_run import dry_run

    with capped(gib):
        return dry_run(training, steps, DOCUMENT, validate=True)
