"""Memory of a run: predicted before it starts, measured while it runs, explained if it runs out."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Sequence

import torch

from longctx.model.offload import HostBuffers
from longctx.planner import fitting, hardware
from longctx.planner.hardware import CLEARLY, GIB, Machine
from longctx.planner.peak_memory import PARAMETERS, predict
from longctx.planner.workload import Workload
from longctx.training.run import Run


def check_fits(candidates: Sequence[Workload], machine: Machine) -> None:
    """Raise ValueError, with a step that fits, if all `candidates` are predicted to take clearly
    more memory than `machine` has, under every policy that memory= leaves open.
    """
    workload = candidates[0]
    host, clearly = machine.host_memory, CLEARLY[workload.device]
    if workload.device == "cuda":
        assert machine.gpu is not None
        kind, there, room = "GPU memory", machine.gpu.memory, fitting.room(machine.gpu)
    else:
        # Each process has its own tensors, and the host's share is among them
        kind, there, host = "memory", host / workload.devices_per_machine, float("inf")
        room = 0.9 * there
    possible = [policy for step in candidates for policy in fitting.policies(step)]
    limit = clearly * host + fitting.HOST_LEFT
    if any(fitting.fits(policy, clearly * there, limit) for policy in possible):
        return
    least = min(possible, key=lambda policy: predict(policy).peak)
    predicted = predict(least)
    if predicted.peak > clearly * there:
        size, largest = predicted.peak, predicted.largest
        share = f", {predicted.gpu[largest] / GIB:,.1f} of it for {largest}"
    else:
        kind, there, size, share = "host memory", host, fitting.on_host(least, predicted), ""
    advice = fitting.smallest_change(least, room, host)
    raise ValueError(
        f"seq_len={least.seq_len} batch_size={least.batch_size} memory={least.memory.policy}: "
        f"a step is predicted to take {size / GIB:,.1f} GiB of {kind}{share}, and there are "
        f"{there / GIB:,.1f}; try {advice}"
    )


def explain(workload: Workload, steps_done: int) -> str:
    """Return the line for a step that ran out of memory: predicted and measured memory, the
    largest term, and the smallest change that fits.
    """
    predicted = predict(workload)
    if workload.device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = hardware.chip(properties.name, float(properties.total_memory))
        room, used = gpu.usable, float(torch.cuda.max_memory_allocated())
        kind, there = "GPU memory", f"{used / GIB:.1f} GiB used of {gpu.memory / GIB:.1f}"
    else:
        room = 0.9 * hardware.host_memory()
        kind, there = "memory", f"{hardware.host_memory() / GIB:.1f} GiB in all"
    # It did not fit, whatever was predicted: the advice must be predicted to take clearly less
    limit = min(room, 0.9 * predicted.peak)
    advice = fitting.smallest_change(workload, limit, hardware.host_memory())
    largest = predicted.gpu[predicted.largest] / GIB
    return (
        f"out of {kind} in step {steps_done + 1} ({there}; {predicted.peak / GIB:.1f} predicted) "
        f"at seq_len={workload.seq_len}, batch_size={workload.batch_size}, "
        f"memory={workload.memory.policy}: {predicted.largest} take {largest:.1f} GiB of it; "
        f"try {advice}"
    )


def predicted_gib(run: Run) -> float:
    """Return the predicted peak of a GPU; on a CPU of this process, which has the model already and
    copies its checkpoints.
    """
    expected = predict(run.workload)
    if run.workload.device == "cuda":
        return expected.peak / GIB
    copy = expected.saved if run.saves_between(run.steps_done) else 0.0
    return (resident() + expected.peak - expected.gpu[PARAMETERS] + copy) / GIB


def measured(device: torch.device) -> dict[str, float]:
    """Return the peak memory in GiB: of torch's allocator on a GPU (in use, and reserved), of the
    whole process on a CPU.
    """
    if device.type == "cuda":
        return {
            "memory_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
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
