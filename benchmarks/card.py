"""What a card reaches in five minutes: attention and training steps with every backend that runs.

Attention is timed forward and backward beside torch's FlashAttention-2, see attention.py. A step is
one micro-batch of 16,384 tokens of `124m`, each sequence one document, compiled as train.py does
it. One file holds the card, its driver, versions, clocks, medians and spreads. Send it in:
`python -m benchmarks cards` puts every file of results/cards into docs/cards.md.
"""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import attention
from benchmarks.report import machine, write_json
from benchmarks.timing import spread
from benchmarks.words import check_unused, decided, training_run
from longctx.config.fields import key
from longctx.planner.peak_memory import predict
from longctx.spec.hardware import GIB
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.training.run import Run

TAKES_TRAINING_KEYS = True
WARM, TIMED = 2, 6  # steps that do not count, and that do
PEERS = ("flash", "sdpa-flash", "sdpa-cudnn", "flex")
PEERS += tuple(f"flash-attention-{version}" for version in (4, 3, 2))
# Backends of steps, the ones that matter most first: time may run short
ORDER = ("flash", "sdpa", "flash_attn", "flex", "naive")
STATE = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu")
SHOWN = ("tokens", "backend", "kernel", "memory", "ms", "spread", "tokens/s", "GiB", "failed")
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What to measure; keys of train.py may follow and hold for the steps."""

    lengths: tuple[int, ...] = key((4096, 16384), "tokens of a sequence")
    tokens: int = key(16384, "of all sequences together, if they are shorter")
    head_sizes: tuple[int, ...] = key((64, 128), "of attention")
    channels: int = key(2048, "query heads × head size of attention")
    minutes: float = key(5.0, "for everything, about; steps not begun by then are left out")
    out: str = key("results/cards", "folder that gets a .json with the name of the card")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure attention, then steps; print tables and write the card's file after each point."""
    import torch
    import torch._functorch.config as functorch_config

    check_unused(
        overrides,
        {
            "seq_len": "use lengths=",
            "attention": "every backend is tried",
            "batch_size": "use tokens=",
        },
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = machine() | state()
    ceiling = attention.matmul_tflops(device, 8192 if device == "cuda" else 256)
    name = about["gpu"] if device == "cuda" else "cpu"
    path = Path(options.out) / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")
    end = time.monotonic() + 60 * options.minutes
    result: Row = {"command": command, **about, "memory_gib": memory_gib()}
    result |= {"options": asdict(options), "overrides": with_model(overrides)}
    result |= {"matmul_tflops": ceiling, "attention": [], "steps": []}
    print(f"{name}, bf16 matrix product {ceiling:.1f} TFLOP/s", flush=True)

    of_attention = attention.Options(
        backends=PEERS,
        channels=options.channels,
        row_tokens=options.tokens,
        repeats=20,
        seconds=int(24 * options.minutes),  # two fifths; most of the rest is compiling steps
    )
    clock, cases = attention.Clock(of_attention.seconds), attention_cases(options)
    for number, (mask, size, length) in enumerate(cases):
        seconds = clock.left() / (len(cases) - number)
        # Lets a compiled backward be timed again and again
        with functorch_config.patch(donated_buffer=False):
            result["attention"] += attention.measure(
                of_attention, mask, size, length, clock, seconds, device, ceiling
            )
        write_json(path, result)
    grid("Attention, forward and backward", *table(result["attention"]))

    for length in options.lengths:
        for backend, training in steps(options, length, overrides, device).items():
            if time.monotonic() > end:
                print(f"left out: {backend} with {length:,} tokens; give more minutes=")
                continue
            result["steps"].append(timed(training, backend))
            print(result["steps"][-1], flush=True)
            write_json(path, result)
    grid("Training steps", SHOWN, [readable(row) for row in result["steps"]])
    print(f"wrote {path}")


def attention_cases(options: Options) -> list[tuple[str, int, int]]:
    """Return mask, head size and length: causal in every size, packed and windowed in the last."""
    causal = [("causal", size, n) for size in options.head_sizes for n in options.lengths]
    return causal + [
        (mask, options.head_sizes[-1], options.lengths[-1]) for mask in ("documents", "window")
    ]


def state() -> dict[str, str]:
    """Return the driver, clocks and power limit of the card, as far as nvidia-smi tells them."""
    query = ["nvidia-smi", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # AMD, or a CPU
        return {}
    return dict(zip(STATE, (value.strip() for value in answer.split(",")), strict=False))


def memory_gib() -> float:
    """Return the memory of the GPU here; 0 if there is none."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    return float(torch.cuda.get_device_properties(0).total_memory) / GIB


def with_model(overrides: list[str]) -> list[str]:
    """Return `overrides`, with model=124m if they name no model."""
    names_model = any(override.startswith("model=") for override in overrides)
    return overrides if names_model else ["model=124m", *overrides]


def steps(options: Options, length: int, overrides: list[str], device: str) -> dict[str, Run]:
    """Return backend → a run with it, for all that compute the model exactly on this device."""
    from longctx.parallel.devices import able_backends

    batch_size = max(1, options.tokens // length)
    given = [f"seq_len={length}", f"batch_size={batch_size}", "accumulate=1"]
    given += with_model(overrides)
    run = training_run(given, device)
    able = able_backends(run.config, run.workload.model, device)
    return {
        name: training_run([*given, f"attention={name}"], device) for name in ORDER if name in able
    }


def timed(run: Run, backend: str) -> Row:
    """Return the median time of a step; `failed` says why there is none."""
    import torch

    from longctx.parallel.devices import this_machine
    from longctx.training.dry_run import dry_run

    run = decided(run)
    work, gpu = run.workload, this_machine().gpu
    peak = predict(work).peak
    row: Row = {
        "backend": backend,
        "tokens": work.seq_len,
        "batch": work.batch_size,
        "memory": work.memory.policy,
        "predicted_gib": peak / GIB,
    }
    if gpu is not None and peak > gpu.usable:
        return row | {"failed": f"predicted to take {peak / GIB:.0f} GiB"}
    torch._dynamo.reset()
    try:
        measured = dry_run(run, WARM + TIMED)
    except Exception as error:  # of compilers and kernels: any
        return row | {"failed": attention.failure(error)}
    row |= {"gib": measured.memory.get("memory_peak_gib"), "failed": measured.failed}
    if measured.failed is not None:
        return row
    ms = measured.ms[WARM:]
    return row | {
        "kernel": measured.kernels[backend],
        "ms": median(ms),
        "spread": spread(ms),
        "tokens_per_second": 1000 * measured.tokens / median(ms),
    }


def table(rows: list[Row]) -> tuple[list[str], list[Row]]:
    """Return columns and lines: a case in each, TFLOP/s of both passes and the ratio by backend."""
    lines: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        case = {name: row[name] for name in ("mask", "head_size", "tokens")}
        line = lines.setdefault(tuple(case.values()), dict(case))
        if "skipped" not in row:
            ratio = f" ({row['both_ratio']:.2f} ×)" if "both_ratio" in row else ""
            line[row["backend"]] = f"{row['both_tflops']:.1f}{ratio}"
    columns = list(dict.fromkeys(name for line in lines.values() for name in line))
    return columns, list(lines.values())


def readable(row: Row) -> Row:
    """Return the row of a step for a table."""
    if row["failed"] is not None:
        return row
    return row | {
        "ms": f"{row['ms']:,.1f}",
        "spread": f"{row['spread']:.1%}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "GiB": f"{row['gib'] or 0:.1f}",
    }
