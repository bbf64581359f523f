"""Predicted peak memory beside the measured, over models, lengths, policies, backends: how far the plan can be trusted.

Every point is two steps, on packed documents, and a validation batch in a child process (`longctx.training.probe`), several
at a time: memory, unlike time, is the same in company. The models are the presets with fewer layers.
"""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from longctx.bench.report import grid, machine, write_json
from longctx.bench.words import training_config
from longctx.training.chips import GIB
from longctx.training.config import CompleteConfig
from longctx.training.inventory import predict

TAKES_TRAINING_KEYS = True
DOCUMENT = 2048  # tokens
SECONDS = 300.0  # that a point may take


@dataclass(frozen=True)
class Options:
    """Every combination of these; keys of train.py may follow and hold for all."""

    models: tuple[str, ...] = field(default=("124m", "1b"), metadata={"help": "presets"})
    layers: int = field(default=4, metadata={"help": "of each model"})
    policies: tuple[str, ...] = field(default=("fast", "balanced", "long"), metadata={"help": "memory="})
    backends: tuple[str, ...] = field(
        default=("naive", "sdpa", "flash"),
        metadata={"help": "attention backends; BACKEND:KERNEL picks its kernel option"},
    )
    lengths: tuple[int, ...] = field(default=(16384, 49152), metadata={"help": "tokens in a row"})
    naive_lengths: tuple[int, ...] = field(default=(2048, 4096), metadata={"help": "those of naive attention"})
    accumulate: tuple[int, ...] = field(default=(2,), metadata={"help": "micro-batches of a step"})
    parallel: int = field(default=8, metadata={"help": "processes at a time"})
    minutes: float = field(default=10.0, metadata={"help": "points not begun by then are left out"})
    out: str = field(default="results/memory", metadata={"help": "writes .json"})


def run(options: Options, command: str, words: list[str]) -> None:
    """Measure, print predicted and measured of every point, write `out`.json."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench memory measures a GPU's memory and there is no CUDA GPU here")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # of each process
    configs = list(combinations(options, words))
    with ThreadPoolExecutor(options.parallel) as pool:
        end = time.monotonic() + 60 * options.minutes
        rows = [row for row in pool.map(lambda config: point(config, end), configs) if row]
    errors = sorted(abs(row["error"]) for row in rows if row["error"] is not None)
    shown = (
        "model",
        "memory",
        "backend",
        "tokens",
        "accumulate",
        "predicted_gib",
        "measured_gib",
        "off",
        "moment",
        "failed",
    )
    grid("Peak memory, predicted and measured", shown, [row | {"off": off(row["error"])} for row in rows])
    within = sum(error <= 0.03 for error in errors)
    print(f"{within} of {len(errors)} within 3%, the worst {max(errors, default=0.0):.1%}")
    found = {"command": command, **machine(), "options": asdict(options), "within_3_percent": within, "rows": rows}
    write_json(Path(f"{options.out}.json"), found)
    print(f"wrote {options.out}.json")


def combinations(options: Options, words: list[str]) -> list[tuple[str, CompleteConfig]]:
    """Name and configuration of every point."""
    found = []
    for model, policy, word, accumulate in itertools.product(
        options.models, options.policies, options.backends, options.accumulate
    ):
        backend, _, kernel = word.partition(":")
        chosen = [f"model={model}", f"model.layers={options.layers}", f"memory={policy}", f"attention={backend}"]
        chosen += [f"++attention.options.kernel={kernel}"] if kernel else []
        for length in options.naive_lengths if backend == "naive" else options.lengths:
            config = training_config(
                [*chosen, f"seq_len={length}", "batch_size=1", f"accumulate={accumulate}", *words], "cuda"
            )
            found.append((model, replace(config, val_rows=1)))
    return found


def point(named: tuple[str, CompleteConfig], end: float) -> dict[str, Any] | None:
    """One row: the prediction, the measurement, and how far apart they are; None where the clock is past `end`."""
    from longctx.training.probe import in_child

    if time.monotonic() > end:
        return None
    model, config = named
    predicted = predict(config)
    measured = in_child(config, "cuda", 2, DOCUMENT, True, SECONDS)
    peak = measured.memory.get("memory_peak_gib")
    kernel = config.attention.options.get("kernel", "auto")
    error = None if measured.failed or not peak else predicted.peak / GIB / peak - 1
    row = {
        "model": model,
        "layers": config.model.layers,
        "memory": config.memory.policy,
        "backend": config.attention.backend + ("" if kernel == "auto" else f":{kernel}"),
        "tokens": config.seq_len,
        "accumulate": config.accumulate,
        "predicted_gib": predicted.peak / GIB,
        "measured_gib": peak,
        "moment": predicted.moment,
        "terms": {term: size / GIB for term, size in predicted.gpu.items()},
        "ms": measured.ms,
        "failed": measured.failed,
        "error": error,
    }
    print(f"{model} {row['memory']} {row['backend']} {config.seq_len}: {off(error) or measured.failed}", flush=True)
    return row


def off(error: float | None) -> str:
    """+2.1%: predicted more than measured."""
    return "" if error is None else f"{error:+.1%}"
