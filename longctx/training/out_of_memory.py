"""Memory of a training step that is, or will be, too little: explained with a remedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longctx.planner import fitting, hardware
from longctx.planner.hardware import CLEARLY, GIB, Machine
from longctx.planner.peak_memory import predict
from longctx.planner.workload import Workload


def check_fits(candidates: Sequence[Workload], machine: Machine) -> None:
    """Raise ValueError, with what fits, where each of `candidates`, with every policy that its
    memory= leaves open, is predicted to take clearly more memory than `machine` has.
    """
    work = candidates[0]
    host, clearly = machine.host_memory, CLEARLY[work.device]
    if work.device == "cuda":
        assert machine.gpu is not None
        kind, there, room = "GPU memory", machine.gpu.memory, fitting.room(machine.gpu)
    else:
        # Each process has its own tensors; what is said to lie on the host is among them
        kind, there, host = "memory", host / work.devices_per_machine, float("inf")
        room = 0.9 * there
    possible = [chosen for one in candidates for chosen in fitting.policies(one)]
    most = clearly * host + fitting.HOST_LEFT
    if any(fitting.fits(chosen, clearly * there, most) for chosen in possible):
        return
    least = min(possible, key=lambda chosen: predict(chosen).peak)
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


def explain(work: Workload, steps_done: int) -> str:
    """What ran out, predicted and measured, which term takes most, and the smallest change that
    fits.
    """
    predicted = predict(work)
    if work.device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = hardware.chip(properties.name, float(properties.total_memory))
        room, used = gpu.usable, float(torch.cuda.max_memory_allocated())
        kind, there = "GPU memory", f"{used / GIB:.1f} GiB used of {gpu.memory / GIB:.1f}"
    else:
        room = 0.9 * hardware.host_memory()
        kind, there = "memory", f"{hardware.host_memory() / GIB:.1f} GiB in all"
    # It did not fit, whatever the prediction was: what fits must be predicted to take clearly less.
    limit = min(room, 0.9 * predicted.peak)
    advice = fitting.smallest_change(work, limit, hardware.host_memory())
    largest = predicted.gpu[predicted.largest] / GIB
    return (
        f"out of {kind} in step {steps_done + 1} ({there}; {predicted.peak / GIB:.1f} predicted) "
        f"at seq_len={work.seq_len}, batch_size={work.batch_size}, memory={work.memory.policy}: "
        f"{predicted.largest} take {largest:.1f} GiB of it; try {advice}"
    )
