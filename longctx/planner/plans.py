"""The one question to the planner: how does this step run on that machine? No torch.

A step names what is open in it: backends, divisions, the memory policy, micro-batches, the length.
A plan has none of these open, and says what was predicted of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from longctx.attention.description import AUTO, AttentionConfig
from longctx.planner import fitting, step_time
from longctx.planner.peak_memory import Memory, predict
from longctx.planner.step_time import Seconds
from longctx.spec.hardware import GIB, Chip, Machine
from longctx.spec.step import Division, Workload

# A run is refused if its predicted memory is so many times the available memory. On GPUs
# predictions are within a tenth for training, and rougher for evaluation; on a CPU naive attention
# took 6.1 GiB of 8.4 predicted.
CLEARLY = {"cuda": 1.3, "cpu": 2.0}
Say = Callable[[str], None]
FindLongest = Callable[..., Workload]  # of candidates: each gives the step for a length


@dataclass(frozen=True)
class Plan:
    """A step with nothing left open, its predictions, and the reason for an open division."""

    step: Workload
    memory: Memory
    time: Seconds | None  # of an unknown chip, or on a CPU
    note: str = ""


def plan(
    step: Workload, machine: Machine, say: Say = print, find_longest: FindLongest | None = None
) -> Plan:
    """Return the plan of `step` on `machine`; `say` gets a line for each choice with a reason.

    `find_longest` decides seq_len=max. Raises ValueError, with a step that fits, if a step is
    predicted to take clearly more than there is.
    """
    chip = machine.gpu if step.device == "cuda" else None
    host = machine.host_memory
    if step.attention.backend == AUTO:
        step = with_backend(step, chip, host, say)
    # An evaluation asks for a backend; a step of training need not fit
    if not step.trains:
        return Plan(replace(step, backends=()), predict(step), None)
    candidates = [partial(step.divided, division) for division in able_divisions(step)]
    if step.is_longest:
        assert find_longest is not None
        chosen, reason = find_longest(candidates), "the longest sequences"
    else:
        steps = [candidate(step.seq_len) for candidate in candidates]
        chosen, reason = steps[0], "nothing is predicted on a CPU"
        if chip is not None:
            decided = [fitting.decide(x, chip, host, step.merges) for x in steps]
            chosen, reason = fitting.choose_layout(decided, chip, host)
        check_fits(chosen, machine)
    chosen.check_graphs()
    if chip is not None:
        names = [backend.backend for backend in step.backends]
        memory = fitting.memory_line(step.memory, chosen, chip, host)
        for line in filter(None, (memory, fitting.faster_backend(chosen, names, chip))):
            say(line)
    note = f"{fitting.name_of(chosen)} (auto: {reason})" if len(candidates) > 1 else ""
    time = None if chip is None else step_time.seconds(chosen, chip)
    return Plan(replace(chosen, backends=()), predict(chosen), time, note)


def with_backend(step: Workload, chip: Chip | None, host: float, say: Say) -> Workload:
    """Return `step` with its fastest backend: predicted on a GPU, as measured on a CPU."""
    able = {backend.backend: backend for backend in step.backends}
    if chip is None:
        name = max(able, key=lambda name: able[name].description.on_cpu)
        reason = "the fastest on a CPU that computes this exactly"
    else:
        # Divisions are still open, and attention is divided alike in each
        whole = step.divisions[0]._replace(context=1, context_method="ulysses")
        single = replace(step, attention=AttentionConfig()).divided(whole, step.seq_len)
        single = fitting.decide(single, chip, host, step.merges)
        name, reason = fitting.fastest_backend(single, list(able), chip)
    say(f"attention=auto: {name}, {reason}")
    return replace(step, attention=able[name])


def able_divisions(step: Workload) -> list[Division]:
    """Return the open divisions that the backend of `step` can compute, the plainest first."""
    if all(x.description.takes_intervals for x in step.attention.each):
        return list(step.divisions)
    # A rank's queries would see arbitrary intervals of keys
    free = [division for division in step.divisions if division.context_method != "allgather"]
    return free or list(step.divisions)


def limits(workload: Workload, machine: Machine) -> tuple[str, float, float, float]:
    """Return the name of the memory for each process of `workload`, its bytes in all and to be
    filled by a step, and those on the host.
    """
    if (gpu := machine.gpu) and workload.device == "cuda":
        return "GPU memory", gpu.memory, fitting.room(gpu), machine.host_memory
    # Each process has its own tensors, the host's share among them; within_memory leaves a tenth
    total = machine.host_memory / workload.devices_per_machine
    return "memory", total, 0.9 * total, float("inf")


def check_fits(step: Workload, machine: Machine) -> None:
    """Raise ValueError, with a step that fits, if `step` is predicted to take clearly more memory
    than `machine` has, with all settings left open by memory=. A prediction may be wrong.
    """
    (name, total, usable, host), clearly = limits(step, machine), CLEARLY[step.device]
    if fitting.first_that_fits(step, clearly * total, clearly * host + fitting.HOST_LEFT):
        return
    smallest = fitting.smallest(step)
    predicted = predict(smallest)
    advice = fitting.smallest_change(smallest, usable, host)
    text = f"{fitting.on_host(smallest, predicted) / GIB:,.1f} GiB of host memory"
    if predicted.peak > clearly * total:
        share = f"{predicted.gpu[predicted.largest] / GIB:,.1f} of it for {predicted.largest}"
        text, host = f"{predicted.peak / GIB:,.1f} GiB of {name}, {share}", total
    raise ValueError(
        f"seq_len={smallest.seq_len} batch_size={smallest.batch_size} "
        f"memory={smallest.memory}: a step is predicted to take {text}, and there are "
        f"{host / GIB:,.1f}; try {advice}"
    )


def explain(step: Workload, steps_done: int, machine: Machine, used: float | None) -> str:
    """Return the line for a step that ran out of memory: predicted and `used` bytes, the largest
    term, and the smallest change that fits.
    """
    (name, total, usable, host), predicted = limits(step, machine), predict(step)
    of = "" if used is None else f"{used / GIB:.1f} GiB used of "
    # It did not fit, whatever was predicted: the advice must be predicted to take clearly less
    limit = min(usable, 0.9 * predicted.peak)
    advice = fitting.smallest_change(step, limit, host)
    largest = predicted.gpu[predicted.largest] / GIB
    return (
        f"out of {name} in step {steps_done + 1} ({of}{total / GIB:.1f} GiB; "
        f"{predicted.peak / GIB:.1f} predicted) at seq_len={step.seq_len}, "
        f"batch_size={step.batch_size}, memory={step.memory}: "
        f"{predicted.largest} take {largest:.1f} GiB of it; try {advice}"
    )
