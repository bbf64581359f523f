"""Memory of a run: predicted before it starts, measured while it runs, explained if it runs out."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from longctx.model.offload import HostBuffers
from longctx.planner import fitting
from longctx.planner.peak_memory import PARAMETERS, predict
from longctx.spec.hardware import CLEARLY, GIB, Machine
from longctx.spec.step import Workload
from longctx.training.run import Run


class Limits(NamedTuple):
    """Bytes of memory for one process: in all, to be filled by a step, and on the host."""

    name: str
    total: float
    usable: float
    host: float


def limits(workload: Workload, machine: Machine) -> Limits:
    """Return the memory of `machine` for each process of `workload`."""
    if workload.device == "cuda":
        assert machine.gpu is not None
        gpu = machine.gpu
        return Limits("GPU memory", gpu.memory, fitting.room(gpu), machine.host_memory)
    # Each process has its own tensors, the host's share among them; within_memory leaves a tenth
    total = machine.host_memory / workload.devices_per_machine
    return Limits("memory", total, 0.9 * total, float("inf"))


def check_fits(candidates: Sequence[Workload], machine: Machine) -> None:
    """Raise ValueError, with a step that fits, if none of `candidates` is predicted to fit.

    Each is tried with every policy that memory= leaves open. A prediction may be wrong, so a step
    is refused only if it takes clearly more than `machine` has.
    """
    there, clearly = limits(candidates[0], machine), CLEARLY[candidates[0].device]
    possible = [policy for step in candidates for policy in fitting.policies(step)]
    host_limit = clearly * there.host + fitting.HOST_LEFT
    if any(fitting.fits(policy, clearly * there.total, host_limit) for policy in possible):
        return
    smallest = min(possible, key=lambda policy: predict(policy).peak)
    predicted = predict(smallest)
    text = f"{fitting.on_host(smallest, predicted) / GIB:,.1f} GiB of host memory"
    total = there.host
    if predicted.peak > clearly * there.total:
        largest, total = predicted.largest, there.total
        share = f"{predicted.gpu[largest] / GIB:,.1f} of it for {largest}"
        text = f"{predicted.peak / GIB:,.1f} GiB of {there.name}, {share}"
    advice = fitting.smallest_change(smallest, there.usable, there.host)
    raise ValueError(
        f"seq_len={smallest.seq_len} batch_size={smallest.batch_size} "
        f"memory={smallest.memory.policy}: a step is predicted to take {text}, and there are "
        f"{total / GIB:,.1f}; try {advice}"
    )


def explain(workload: Workload, steps_done: int, machine: Machine) -> str:
    """Return the line for a step that ran out of memory: predicted and measured memory, the
    largest term, and the smallest change that fits.
    """
    there, predicted = limits(workload, machine), predict(workload)
    used = ""
    if workload.device == "cuda":
        used = f"{torch.cuda.max_memory_allocated() / GIB:.1f} GiB used of "
    # It did not fit, whatever was predicted: the advice must be predicted to take clearly less
    limit = min(there.usable, 0.9 * predicted.peak)
    advice = fitting.smallest_change(workload, limit, there.host)
    largest = predicted.gpu[predicted.largest] / GIB
    return (
        f"out of {there.name} in step {steps_done + 1} ({used}{there.total / GIB:.1f} GiB; "
        f"{predicted.peak / GIB:.1f} predicted) at seq_len={workload.seq_len}, "
        f"batch_size={workload.batch_size}, memory={workload.memory.policy}: "
        f"{predicted.largest} take {largest:.1f} GiB of it; try {advice}"
    )


def predicted_gib(run: Run, has_model: bool = True) -> float:
    """Return the predicted peak of a GPU; on a CPU of this process, which copies its checkpoints,
    and has the model already or not.
    """
    expected = predict(run.workload)
    if run.workload.device == "cuda":
        return expected.peak / GIB
    # The last checkpoint is written without a copy
    next_save = (run.steps_done // run.config.checkpoint_every + 1) * run.config.checkpoint_every
    copies = run.config.keep_best or next_save < run.max_steps
    copy = expected.saved if copies else 0.0
    counted_twice = expected.gpu[PARAMETERS] if has_model else 0.0
    return (resident() + expected.peak - counted_twice + copy) / GIB


def measured(device: torch.device) -> dict[str, float]:
    """Return the peak memory in GiB: of torch's allocator on a GPU (in use, and reserved), of the
    whole process on a CPU.
    """
    if device.type == "cuda":
        return {
            "memory_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
    # Linux counts in KiB
    unit = 1 if sys.platform == "darwin" else 1024
    return {"process_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}


def resident() -> float:
    """Return the bytes that this process has now; its peak on systems without /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return measured(torch.device("cpu"))["process_peak_gib"] * GIB


def freeze_garbage() -> None:
    """Leave libraries and compiled code, which live after the first step, out of later collections.

    A full collection looks through all of torch for 0.2 to 0.4 s, on each rank at another step, and
    all other ranks wait for it.
    """
    gc.collect()
    gc.freeze()


def free(device: str) -> None:
    """Give back a GPU's memory and page-locked memory while the last checkpoint is written: the
    exit of the process would take that time.
    """
    if device == "cuda":
        torch.cuda.synchronize()  # copies from and to page-locked memory may be under way
        HostBuffers.free()
        torch.cuda.empty_cache()
