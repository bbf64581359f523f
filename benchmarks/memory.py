"""Predicted peak memory next to the measured, over models, lengths, policies, backends: how far the
plan can be trusted.

Every point is two steps on packed documents and a validation batch in a process of its own. As many
points run at a time as are predicted to fit together: unlike time, memory does not change with
company. The models are the presets with fewer layers. Most of a point's time is starting Python and
compiling.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.points import Row, off, point, training_run
from benchmarks.report import machine, write_json
from benchmarks.words import check_unused
from longctx.config.fields import Group, key
from longctx.planner.peak_memory import predict
from longctx.spec.hardware import GIB
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.training.run import Run

TAKES_TRAINING_KEYS = True
TAKEN = {
    "model": "use models=",
    "model.layers": "use layers=",
    "memory": "use policies=",
    "attention": "use backends=",
    "seq_len": "use lengths=, long_lengths= and naive_lengths=",
    "batch_size": "it is one sequence",
    "lora.rank": "use lora_models=",
}
DOCUMENT = 2048  # tokens
CONTEXT = 1.5 * GIB  # that a process takes besides its tensors
SHOWN = ("model", "lora", "memory", "backend", "tokens", "accumulate", "predicted_gib")
SHOWN += ("measured_gib", "off", "moment", "failed")


@dataclass(frozen=True)
class Options(Group):
    """Every combination of these, then LoRA's; keys of train.py may follow and hold for all."""

    models: tuple[str, ...] = key(("124m", "1b"), "presets")
    layers: int = key(3, "of each model")
    policies: tuple[str, ...] = key(("fast", "balanced"), "memory=")
    backends: tuple[str, ...] = key(
        ("flash", "flash:portable", "sdpa", "naive"),
        "attention backends; BACKEND:KERNEL picks its kernel option",
    )
    lengths: tuple[int, ...] = key((8192, 65536), "tokens of a sequence")
    naive_lengths: tuple[int, ...] = key((2048, 4096), "those of naive attention")
    lora_models: tuple[str, ...] = key(
        ("1b", "8b"), "presets trained by lora.rank=16 too, with the first backend"
    )
    accumulate: tuple[int, ...] = key((2,), "micro-batches of a step")
    parallel: int = key(8, "processes at a time")
    minutes: float = key(10.0, "points not begun by then are left out")
    out: str = key("results/memory", "writes .json")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure, print predicted and measured of every point, write `out`.json."""
    import torch

    check_unused(overrides, TAKEN)
    if not torch.cuda.is_available():
        raise ValueError("memory: measures a GPU's memory, and there is no CUDA GPU here")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # of each process
    end, room = time.monotonic() + 60 * options.minutes, Room(0.95 * torch.cuda.mem_get_info()[0])
    rows: list[Row] = []
    result = {"command": command, **machine(), "options": asdict(options), "rows": rows}

    def measured(case: tuple[str, Run]) -> Row | None:
        model, run = case
        work, predicted = run.workload, predict(run.workload)
        with room.reserved(1.05 * predicted.peak + CONTEXT):
            if time.monotonic() > end:
                return None
            row = point(run, 1, 1, DOCUMENT, validate=True, seconds=300)
        kernel = work.attention.options.get("kernel", "auto")
        row["backend"] += "" if kernel == "auto" else f":{kernel}"
        row |= {"model": model, "layers": work.model.layers, "lora": work.lora.rank}
        row |= {"accumulate": work.accumulate, "moment": predicted.moment}
        row["terms"] = {term: size / GIB for term, size in predicted.gpu.items()}
        name = f"{model} {row['memory']} {row['backend']} {work.seq_len}"
        print(f"{name}: {off(row['error']) or row['failed']}", flush=True)
        return row

    with ThreadPoolExecutor(options.parallel) as pool:
        for row in pool.map(measured, combinations(options, overrides)):
            rows += [row] if row else []
            write_json(Path(f"{options.out}.json"), result)  # an interruption loses no row
    errors = sorted(abs(row["error"]) for row in rows if row["error"] is not None)
    shown = [row | {"off": off(row["error"])} for row in rows]
    grid("Peak memory, predicted and measured", SHOWN, shown)
    result["within_3_percent"] = sum(error <= 0.03 for error in errors)
    worst = max(errors, default=0.0)
    print(f"{result['within_3_percent']} of {len(errors)} within 3%, the worst {worst:.1%}")
    write_json(Path(f"{options.out}.json"), result)
    print(f"wrote {options.out}.json")


def combinations(options: Options, overrides: list[str]) -> Iterator[tuple[str, Run]]:
    """Yield model preset and run of every point."""
    kinds = [(model, backend, "") for model in options.models for backend in options.backends]
    kinds += [(model, options.backends[0], "lora.rank=16") for model in options.lora_models]
    for (model, backend_and_kernel, lora), policy, accumulate in itertools.product(
        kinds, options.policies, options.accumulate
    ):
        backend, _, kernel = backend_and_kernel.partition(":")
        chosen = [f"model={model}", f"model.layers={options.layers}", f"memory={policy}"]
        chosen += [f"attention={backend}", "batch_size=1", f"accumulate={accumulate}"]
        chosen += ["graphs=false"]  # two steps are too few to capture
        chosen += [f"attention.options.kernel={kernel}"] if kernel else []
        chosen += [lora] if lora else []
        for length in options.naive_lengths if backend == "naive" else options.lengths:
            run = training_run([*chosen, f"seq_len={length}", *overrides], "cuda")
            yield model, replace(run, val_rows=1)


class Room:
    """A number of bytes that processes share: each waits until its own are free."""

    def __init__(self, size: float) -> None:
        self.size, self.free, self.changed = size, size, threading.Condition()

    @contextmanager
    def reserved(self, size: float) -> Iterator[None]:
        """Keep `size` bytes, or all of them if it is more, from others."""
        mine = min(size, self.size)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= mine)
            self.free -= mine
        try:
            yield
        finally:
            with self.changed:
                self.free += mine
                self.changed.notify_all()
