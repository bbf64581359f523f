"""Which configurations fit and are fastest: memory policies, lengths, backends, layouts. No torch.

A layout is how the devices of a run share its model and its sequences: a strategy, a degree of
context parallelism and its method. Open layouts have one order, the plainest first: fewer devices
per sequence, ulysses before allgather, ddp before fsdp. A later one is chosen only if the earlier
do not fit, are clearly slower, or need host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import lcm

from longctx.attention.description import AttentionConfig, capturable_backends
from longctx.config.layout_config import POLICIES
from longctx.planner import step_time
from longctx.planner.peak_memory import Memory, predict
from longctx.spec.hardware import COPY_SHARE, Chip
from longctx.spec.step import LONGEST_ROW, Workload

HOST_LEFT = 12 * 2**30  # bytes of host memory left to the process, its libraries and the data
LEFT_FREE = 0.05  # of the GPU, if no dry run checks a decision
SURE = 0.95  # a speed of less than this share of another is slower
CLEARLY_FASTER = 1.1  # times another backend's speed, to be told at the start


def with_policy(workload: Workload, policy: str) -> Workload:
    """Return `workload` with memory=`policy`; given keys stay, ValueError if they contradict it."""
    chosen = replace(workload, memory=workload.memory.filled(policy))
    chosen.memory.validate()
    return chosen


def policies(workload: Workload) -> list[Workload]:
    """Return `workload` with each policy that memory= and optimizer= allow, the fastest first."""
    each = [with_policy(workload, name) for name in workload.memory.policies()]
    states = workload.optimizer.traits.states
    return [chosen for chosen in each if chosen.memory.optimizer_state in states]


def fits(workload: Workload, gpu: float, host: float) -> bool:
    """Return True if `workload`, its policy decided, fits so many bytes of GPU and host memory."""
    memory = predict(workload)
    host_bytes = on_host(workload, memory)
    return memory.peak <= gpu and (not host_bytes or host_bytes <= host - HOST_LEFT)


def on_host(workload: Workload, memory: Memory | None = None) -> float:
    """Return the bytes of host memory that all processes of one machine take together."""
    return workload.devices_per_machine * sum((memory or predict(workload)).host.values())


def copy_on_host(workload: Workload, host: float) -> float:
    """Return the bytes of a machine's host memory for the copy that background saving writes; 0 if
    there is no room for it: then the steps wait for each checkpoint.
    """
    memory = predict(workload)
    writers = workload.devices_per_machine if workload.sharing.shards_weights else 1
    free = host - HOST_LEFT - on_host(workload, memory)
    return writers * memory.saved if writers * memory.saved <= COPY_SHARE * free else 0.0


def room(chip: Chip) -> float:
    """Return the bytes of the GPU that a decision may fill without a dry run."""
    return (1 - LEFT_FREE) * chip.usable


def first_that_fits(workload: Workload, gpu: float, host: float) -> Workload | None:
    """Return `workload` with its fastest policy within so many bytes of GPU and host memory."""
    return next((chosen for chosen in policies(workload) if fits(chosen, gpu, host)), None)


def decide(workload: Workload, chip: Chip, host: float, merge: bool = False) -> Workload:
    """Return `workload` with memory=auto decided: the fastest policy that fits, else the smallest.

    With `merge`, a step first gets as few micro-batches as fit with the fastest policy, since a GPU
    waits for the host between small kernels.
    """
    for larger in merged(workload) if merge else []:
        fastest = policies(larger)[0]
        if fits(fastest, room(chip), host):
            return fastest
    return first_that_fits(workload, room(chip), host) or min(
        policies(workload), key=lambda chosen: predict(chosen).peak
    )


def merged(workload: Workload) -> list[Workload]:
    """Return the same step in 1, 2, ... equal micro-batches, up to the number that it has."""
    sequences = workload.batch_size * workload.accumulate
    return [
        replace(workload, batch_size=sequences // count, accumulate=count)
        for count in range(1, workload.accumulate + 1)
        if sequences % count == 0
    ]


def longest(
    candidates: Sequence[Callable[[int], Workload]],
    gpu: float,
    host: float,
    multiple: int = 128,
    limit: int = LONGEST_ROW,
) -> Workload | None:
    """Return the step of the longest sequences that fit in one of `candidates`, functions from a
    length to the step, or None, with the fastest policy. Devices of a sequence hold equal parts.
    """
    best: Workload | None = None
    for at in reversed(candidates):  # the longest come last
        unit = lcm(multiple, at(multiple).context)
        low, high = 0 if best is None else best.seq_len // unit, limit // unit
        # Most candidates are no longer: one unit more is tried first
        if low == high or first_that_fits(at((low + 1) * unit), gpu, host) is None:
            continue
        while low < high:
            middle = (low + high + 1) // 2
            does_fit = first_that_fits(at(middle * unit), gpu, host) is not None
            low, high = (middle, high) if does_fit else (low, middle - 1)
        best = first_that_fits(at(low * unit), gpu, host)
    return best


def one_row(workload: Workload) -> Callable[[int], Workload]:
    """Return seq_len → `workload` with one such sequence per micro-batch, and about as many tokens
    per step as before.
    """
    tokens = workload.batch_size * workload.accumulate * workload.seq_len

    def at(seq_len: int) -> Workload:
        accumulate = max(1, tokens // seq_len)
        return replace(workload, seq_len=seq_len, batch_size=1, accumulate=accumulate)

    return at


def smallest_change(workload: Workload, gpu: float, host: float) -> str:
    """Return the smallest change with which `workload` is predicted to fit, as overrides."""
    if workload.attention.description.score_bytes is not None:
        return "attention=flash, which keeps no seq_len × seq_len scores"
    # the same step in more micro-batches
    sequences = workload.accumulate * workload.batch_size
    sizes = [size for size in range(workload.batch_size - 1, 0, -1) if sequences % size == 0]
    for size in sizes:
        smaller = replace(workload, batch_size=size, accumulate=sequences // size)
        if fits(smaller, gpu, host):
            return f"batch_size={size} accumulate={smaller.accumulate}, the same step in pieces"
    # a policy that takes less, if the optimizer can keep its state so
    any_policy = replace(workload, memory=type(workload.memory)("auto"))
    faster = list(POLICIES)[: list(POLICIES).index(workload.memory.policy) + 1]
    for other in policies(any_policy):
        if other.memory.policy not in faster and fits(other, gpu, host):
            return f"memory={other.memory.policy}"
    # shorter sequences with any policy
    shorter = longest([one_row(any_policy)], gpu, host, limit=workload.seq_len)
    if shorter is None:
        if sizes:
            return f"batch_size={sizes[0]} accumulate={sequences // sizes[0]}"
        return "a smaller model="
    is_other = shorter.memory.policy != workload.memory.policy
    policy = f" memory={shorter.memory.policy}" if is_other else ""
    return f"seq_len={shorter.seq_len} batch_size=1{policy}, the longest that fits"


def faster_backend(workload: Workload, backends: Iterable[str], chip: Chip) -> str:
    """Return a line that names the fastest of `backends` if it is predicted CLEARLY_FASTER than
    the backend of `workload`, else nothing.
    """
    own, times = step_time.seconds(workload, chip), backend_seconds(workload, backends, chip)
    name = min(times, key=times.__getitem__, default="")
    if own is None or not name or own.total < CLEARLY_FASTER * times[name]:
        return ""
    share = own.total / times[name] - 1
    return f"attention={name} is predicted {share:.0%} faster on this GPU"


def backend_seconds(workload: Workload, backends: Iterable[str], chip: Chip) -> dict[str, float]:
    """Return the predicted time of a step with each of `backends`; none for an unknown chip."""
    return {
        name: time.total
        for name in backends
        if (time := step_time.seconds(replace(workload, attention=AttentionConfig(name)), chip))
    }


def fastest_backend(workload: Workload, backends: Sequence[str], chip: Chip) -> tuple[str, str]:
    """Return the one of `backends` that is predicted fastest for `workload`, and why."""
    # Graphs save the time of launches, which is not in the prediction
    on = chip.name
    if replace(workload, attention=AttentionConfig()).captured:
        backends = [name for name in backends if name in capturable_backends()] or backends
        on += " in CUDA graphs"
    times = backend_seconds(workload, backends, chip)
    if not times:
        return backends[0], f"since nothing is predicted for {chip.name}"
    name, *slower = sorted(times, key=times.__getitem__)
    if not slower:
        return name, f"the only one for this step on {on}"
    share = times[slower[0]] / times[name] - 1
    return name, f"predicted {share:.0%} faster than {slower[0]} on {on}"


def choose_layout(
    candidates: Sequence[Workload], chip: Chip, host: float, merge: bool = False
) -> tuple[Workload, str]:
    """Return the plainest candidate that fits and is about as fast as the fastest, and why.

    Memory and, with `merge`, micro-batches are decided for each, see `decide`.
    """
    decided = [decide(candidate, chip, host, merge) for candidate in candidates]
    fit = [step for step in decided if fits(step, room(chip), host)]
    if not fit:
        # the run is still tried: a prediction is no proof
        least = min(decided, key=lambda step: predict(step).peak)
        return least, "takes least, though none is predicted to fit"
    speeds = [tokens_per_second(step, chip) for step in fit]
    as_fast = [number for number, speed in enumerate(speeds) if speed >= SURE * max(speeds)]
    # Candidates are in order: the plainest, unless a later one needs no host memory
    chosen = min(as_fast, key=lambda number: on_host(fit[number]) > 0)
    if len(fit) == 1:
        reason = "nothing else fits"
    elif chosen and 0 in as_fast:
        reason = f"as fast as {name_of(fit[0])}, and needs no host memory"
    elif chosen:
        reason = f"{speeds[chosen] / speeds[0] - 1:.0%} faster than {name_of(fit[0])}"
    else:
        reason = "the first that fits"
    return fit[chosen], reason


def tokens_per_second(workload: Workload, chip: Chip) -> float:
    """Return the speed of all devices together; 0 for an unknown chip."""
    time = step_time.seconds(workload, chip)
    return time.tokens / time.total if time is not None else 0.0


def name_of(workload: Workload) -> str:
    """Return the layout as overrides of the command line; ulysses is the usual method."""
    name, method = workload.strategy, workload.context_method
    if workload.context == 1:
        return name
    name += f" context={workload.context}"
    return name if method == "ulysses" else f"{name} context.method={method}"
