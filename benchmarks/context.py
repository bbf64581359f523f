"""The longest context that each backend trains at on this GPU, and memory and speed at every length
up to it.

Whole steps are timed at every length, each in a process of its own, so that running out of memory
is a point of the picture and nothing more. A step has one sequence, of one document. The memory
policy is the one that a run would choose, unless `memory=` is given. `python -m benchmarks picture`
draws the result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.points import Row, decided, expected, point, training_run
from benchmarks.report import machine, write_json
from benchmarks.words import check_unused
from longctx.attention.description import DESCRIPTIONS
from longctx.config.fields import Group, key
from longctx.planner.overview import longest_step
from longctx.spec.hardware import GIB
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.training.run import Run

TAKES_TRAINING_KEYS = True
TAKEN = {"seq_len": "use shortest= and longest=", "attention": "use backends="} | dict.fromkeys(
    ("batch_size", "accumulate"), "it is one sequence"
)
CAPTURED_STEPS = 5  # before the timed one: the second captures CUDA graphs, if a step runs as such
START = 45.0  # seconds that a child takes before its first step: libraries, compilation
SHOWN = ("backend", "tokens", "memory", "memory_peak_gib", "predicted_gib", "tokens_per_second")
SHOWN += ("mfu", "failed")


@dataclass(frozen=True)
class Options(Group):
    """What to measure; keys of train.py may follow, such as model=1b."""

    backends: tuple[str, ...] = key(
        ("naive", "sdpa", "flash"), "attention backends", choices=DESCRIPTIONS
    )
    shortest: int = key(4096, "tokens; lengths double from there to the longest")
    longest: int | None = key(None, "tokens; null: what is predicted to fit")
    minutes: float = key(60.0, "points that would end after that are left out")
    out: str = key("results/context", "writes .json")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure, print, write `out`.json."""
    from longctx.parallel.devices import check_attention, this_machine

    check_unused(overrides, TAKEN)
    end, here = time.monotonic() + 60 * options.minutes, this_machine()
    if here.gpu is None:
        raise ValueError("context: measures what fits a GPU, and there is no CUDA GPU here")
    one_row = ["batch_size=1", "accumulate=1"]
    runs = {
        backend: training_run([*overrides, f"attention={backend}", *one_row], "cuda")
        for backend in options.backends
    }
    for one in runs.values():
        check_attention(one.config, one.workload.model, "cuda")
    how, rows, points = "given" if options.longest else "predicted", list[Row](), []
    result: dict[str, Any] = {"command": command, **machine(), "overrides": overrides}
    result["parameters"] = next(iter(runs.values())).workload.model.parameters()
    result |= {"gpu_memory_gib": here.gpu.memory / GIB, "longest": {}, "rows": rows}
    for backend, one in runs.items():
        found = longest_step([one.workload], here.gpu, here.host_memory)
        longest = options.longest or (found.seq_len if found else 0)
        result["longest"][backend] = {"tokens": longest, "how": how}
        points += [(tokens, backend) for tokens in ladder(options.shortest, longest)]
    for tokens, backend in sorted(points):  # the short ones first: they are cheap
        print(f"{backend} {tokens:,} tokens:", end=" ", flush=True)
        workload = replace(runs[backend].workload, seq_len=tokens)
        rows.append(row := measured(replace(runs[backend], workload=workload), end))
        speed = row.get("tokens_per_second")
        print(f"memory={row['memory']}, {row['failed'] or f'{speed:,.0f} tokens/s'}", flush=True)
        write_json(Path(f"{options.out}.json"), result)  # an interruption loses no point
    grid("Memory and speed over length", SHOWN, rows)
    print(f"wrote {options.out}.json")


def ladder(shortest: int, longest: int) -> list[int]:
    """Return lengths that double from `shortest`, and the longest itself."""
    lengths = []
    while shortest < longest:
        lengths.append(shortest)
        shortest *= 2
    return [*lengths, longest] if longest else lengths


def measured(run: Run, end: float) -> Row:
    """Return one point, as many steps as show speed and memory; `failed` says why it has none."""
    run = decided(run)
    work, left = run.workload, end - time.monotonic()
    # What the optimizer keeps on the GPU is there from the second step on
    warm = CAPTURED_STEPS if work.captured else int(work.memory.optimizer_state != "host")
    row = expected(run)
    if START + (warm + 1) * row.get("predicted_seconds", 0.0) > left:
        return row | {"failed": "left out: it would take more than the minutes left"}
    return point(run, warm, 1, seconds=left)
