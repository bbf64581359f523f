"""A point of a measurement: steps on random tokens in a process of their own, and predictions.

Running out of memory, or a kernel that fails, is a row of the table and ends nothing else.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.processes import in_child
from benchmarks.timing import spread
from longctx import cli, plugins
from longctx.planner import fitting, step_time
from longctx.planner.overview import without_data
from longctx.planner.peak_memory import predict
from longctx.spec.hardware import GIB, Chip

if TYPE_CHECKING:
    from longctx.training.dry_run import DryRun
    from longctx.training.run import Run

Row = dict[str, Any]


def training_run(
    overrides: list[str], device: str, shape: Row | None = None, by_transformers: str = "never"
) -> Run:
    """Return the run that the `overrides` of train.py ask for on "cuda" or "cpu", without data or
    folder; its model is of the config.json `shape`, if there is one.

    On a GPU its memory policy may still be auto: `decided` chooses one.
    """
    from longctx.hf.model_folder import read_config
    from longctx.training.run import scheduled

    if shape is None:
        config = cli.with_model(cli.compose("train", overrides), gpu=device == "cuda").config
        work = without_data(config, device)
        if work.memory.policy != "auto":
            work = replace(work, memory=work.memory.filled(work.memory.policy))
        return scheduled(config, work)
    run = training_run([*overrides, "model=tiny"], device)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        model = read_config(folder, by_transformers)
    compiles = run.workload.compile and model.has_kernels
    return replace(run, workload=replace(run.workload, model=model, compile=compiles))


def decided(run: Run) -> Run:
    """Return `run` with what it takes of the GPU decided by prediction, as a run does it."""
    from longctx.parallel.devices import this_machine

    work, machine = run.workload, this_machine()
    merge = run.config.batch_size is None and run.config.accumulate is None
    if machine.gpu is None or work.device != "cuda":
        return run
    if merge or work.memory.policy == "auto":
        work = fitting.decide(work, machine.gpu, machine.host_memory, merge)
    return replace(run, workload=work)


def this_gpu() -> Chip | None:
    """Return the GPU of this machine."""
    from longctx.parallel.devices import this_machine

    return this_machine().gpu


def expected(run: Run) -> Row:
    """Return what is predicted of a step of `run` on this machine."""
    work, gpu = run.workload, this_gpu()
    predicted = predict(work)
    row: Row = {
        "backend": work.attention.backend,
        "tokens": work.seq_len,
        "rows": work.sequences_per_step,
        "memory": str(work.memory),
        "predicted_gib": predicted.peak / GIB,
        "host_gib": sum(predicted.host.values()) / GIB,
    }
    seconds = gpu and step_time.seconds(work, gpu)
    return row | ({"predicted_seconds": seconds.total} if seconds else {})


def point(
    run: Run,
    warm: int,
    timed: int,
    document: int | None = None,
    validate: bool = False,
    gib: float | None = None,
    seconds: float = 600.0,
    apart: bool = True,
) -> Row:
    """Measure `timed` steps after `warm` ones, in a process that gets `gib` GiB of the GPU and ends
    after `seconds`, or else in this one. `failed` is None, or why there is no speed.
    """
    work, gpu = run.workload, this_gpu()
    row = expected(run) | {"measured_gib": None, "error": None}
    try:
        arguments = run, warm + timed, document, validate, gib
        found = in_child(_stepped, *arguments, seconds=seconds) if apart else _stepped(*arguments)
    except Exception as error:  # of compilers and kernels: any
        return row | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    row |= found.memory | {"ms": found.ms[warm:], "failed": found.failed}
    row["kernel"] = found.kernels.get(work.attention.backend)
    if found.failed is not None:
        return row
    if peak := found.memory.get("memory_peak_gib"):
        row |= {"measured_gib": peak, "error": row["predicted_gib"] / peak - 1}
    speed = 1000 * found.tokens / median(row["ms"])
    row |= {"spread": spread(row["ms"]), "tokens_per_second": speed}
    if gpu is not None and gpu.flops is not None and work.device == "cuda":
        added = work.lora.parameters(work.model, of_token=True)
        per_token = work.model.flops_per_token(found.pairs / found.tokens, added)
        row["mfu"] = per_token * speed / gpu.flops
    return row


def _stepped(
    run: Run, steps: int, document: int | None, validate: bool, gib: float | None
) -> DryRun:
    from longctx.training.dry_run import dry_run

    plugins.load(run.config.plugins or [])
    with capped(gib):
        return dry_run(run, steps, document, validate)


@contextmanager
def capped(gib: float | None) -> Iterator[None]:
    """Give tensors no more than `gib` GiB of the GPU."""
    import torch

    if gib is None or not torch.cuda.is_available():
        yield
        return
    emptied()
    share = gib * GIB / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def emptied() -> None:
    """Give back memory that nothing holds."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def off(error: float | None) -> str:
    """+2.1%: predicted more than measured."""
    return "" if error is None else f"{error:+.1%}"
