"""Which configurations fit and are fastest: memory policies, lengths, backends, layouts. No torch.

A layout is how the devices of a run share its model and its sequences: a strategy, a degree of
context parallelism and its method. Open layouts have one order, the plainest first: fewer devices
per sequence, ulysses before allgather, ddp before fsdp. A later one is chosen only if the earlier
do not fit, are clearly slower, or need host memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import inf, lcm
from typing import Any

from longctx.attention.description import DESCRIPTIONS, AttentionConfig
from longctx.config.layout_config import MemoryConfig
from longctx.model.mixers.description import of_model
from longctx.planner import step_time
from longctx.planner.peak_memory import Memory, predict
from longctx.spec.hardware import COPY_SHARE, CPU, GIB, Chip
from longctx.spec.step import LONGEST, Workload

HOST_LEFT = 12 * 2**30  # bytes of host memory left to the process, its libraries and the data
LEFT_FREE = 0.05  # of the GPU, if no dry run checks a decision
LEAST_FREE = 0.4 * GIB  # gaps between tensors are no smaller on a small card
AS_FAST = 0.99  # of the fastest settings' speed: predictions are no finer
ROUGH = 1.09  # memory of mixers is predicted within 9%, of attention within 3%
SURE = 0.95  # a speed of less than this share of another is slower
CLEARLY_FASTER = 1.1  # times another backend's speed, to be told at the start
# Values that memory=auto tries with each policy for keys left null, the plain ones first.
# Tenths on the host reach up to 20% further than fifths, finer shares no further.
SEARCHED: dict[str, tuple[Any, ...]] = {
    "optimizer_state": ("fp32", "host"),
    "offload_weights": (0.0, 1.0),
    "keep_every": (1, 2, 4, 8),
    "heads_at_once": (0, 2, 1),
    "attention_again": (0.0, 0.5, 1.0),
    "offload": tuple(tenths / 10 for tenths in range(11)),
    "mlp_tile": (0, 32768, 8192),
    "loss_chunk": (None, 1024),
}
# Settings of one way, by share on the host: each list differs in tiles and loss chunk alone
Way = list[list[MemoryConfig]]


def ways(workload: Workload) -> list[Way]:
    """Return the settings that memory= and optimizer= leave open in `workload`, plain ones first.

    In a way, a later share on the host takes less of the GPU, more of the host and more time, and a
    later tile less of the GPU and the same time.
    """
    memory = tuple(vars(workload.memory).values())
    on_cpu = workload.device == "cpu"  # its memory is the host's
    closed = {
        "heads_at_once": workload.context > 1 or workload.attention.variant,
        "offload_weights": on_cpu or workload.strategy != "none" or not workload.added,
        **dict.fromkeys(("offload", "optimizer_state"), on_cpu),
    }
    return _ways(memory, workload.optimizer.traits.states, frozenset(filter(closed.get, closed)))


@cache
def _ways(keys: tuple[Any, ...], states: Sequence[str], closed: frozenset[str]) -> list[Way]:
    memory, options = MemoryConfig(*keys), dict[str, tuple[Any, ...]]()
    for name, values in SEARCHED.items():
        given, is_open = getattr(memory, name), memory.policy == "auto" and name not in closed
        # A policy by name has its own values in place of nulls
        options[name] = values if is_open and given is None else (given,)

    heads, (*timed, shares, tiles, chunks) = options["heads_at_once"], options.values()

    def settings(policy: str, *values: Any, **more: Any) -> Iterator[MemoryConfig]:
        """Yield the possible settings of each tile and loss chunk."""
        for last in product(tiles, chunks):
            more |= zip(SEARCHED, (*values, *last), strict=True)
            x = replace(memory, **more).filled(policy)
            is_possible = x.optimizer_state in states and not x.contradiction(policy)
            # Without tiles the projections of all heads exist at one time
            if is_possible and (x.mlp_tile or not (x.heads_at_once and heads[1:])):
                yield x

    each = [
        [found for share in shares if (found := list(settings(*chosen, share)))]
        for chosen in product(memory.policies(), *timed)
    ]
    if len(memory.policies()) > 1 and memory.recompute_share is None:
        # As many blocks as fit save all, if nothing else has to save memory
        plain = "balanced", *(values[0] for values in (*timed, shares))
        each.append([list(settings(*plain, recompute_share=part / 16)) for part in range(1, 16)])
    return [way for way in each if way]


def smallest(workload: Workload, host: float = inf) -> Workload:
    """Return `workload` with the settings that take least of the GPU. They fit `host` bytes of the
    host's memory if any do.
    """
    each = [[replace(workload, memory=share[-1]) for share in way] for way in ways(workload)]
    # Of each way the shares that the host has room for, or all; the last takes least of the GPU
    able = [
        way[: bisect_left(way, True, key=lambda x: not fits(x, inf, host))] or way for way in each
    ]
    least = min(able, key=lambda way: (not fits(way[-1], inf, host), predict(way[-1]).peak))
    peak = predict(least[-1]).peak  # an earlier share may take no more
    return least[bisect_left(least, True, key=lambda x: predict(x).peak <= peak)]


def fits(workload: Workload, gpu: float, host: float = inf) -> bool:
    """Return True if `workload`, its policy decided, fits so many bytes of GPU and host memory.
    Blocks with mixers that fill the GPU must fit ROUGH times.
    """
    fills = workload.memory.recompute_share not in (None, 0, 1) and of_model(workload.model)
    memory, limit = predict(workload, gpu), gpu / (ROUGH if fills else 1)
    return memory.peak <= limit and on_host(workload, memory) <= max(0, host - HOST_LEFT)


def on_host(workload: Workload, memory: Memory | None = None) -> float:
    """Return the bytes of host memory that all processes of one machine take together."""
    return workload.devices_per_machine * sum((memory or predict(workload, 0)).host.values())


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
    return max(0.0, chip.usable - max(LEFT_FREE * chip.usable, LEAST_FREE))


def first_that_fits(
    workload: Workload, gpu: float, host: float, chip: Chip = CPU
) -> Workload | None:
    """Return `workload` within so many bytes of GPU and host memory, or None.

    Settings AS_FAST as any on `chip` compete: without host memory first, then by least GPU memory.
    For an unknown chip it is the plainest.
    """

    def step(memory: MemoryConfig) -> Workload:
        return replace(workload, memory=memory)

    # A way's first step is its fastest. If it is slower than a step found so far, the way is not
    # tried. An unknown chip has no speeds, so its first is the only one.
    each, same = ways(workload), 0.0
    # Softmax attention takes as long in all. In a hybrid short documents leave little of it
    if each and chip.flops is not None and of_model(workload.model):
        same = workload.accumulate * step_time.attention_seconds(step(each[0][0][0]), chip)
    promised = [tokens_per_second(step(way[0][0]), chip, same) for way in each]
    found: list[tuple[float, Workload]] = []
    for n in sorted(range(len(each)), key=lambda n: -promised[n]):
        least = AS_FAST * max((own for own, _ in found), default=-1.0)
        if promised[n] <= least:
            break
        # With most ways no share leaves room on the GPU. The smallest that does is the fastest, and
        # takes least of the host.
        *others, largest = each[n]
        if not fits(step(largest[-1]), gpu):
            continue
        i = bisect_left(others, True, key=lambda share: fits(step(share[-1]), gpu))
        share = map(step, each[n][i])
        if fit := next((smaller for smaller in share if fits(smaller, gpu, host)), None):
            found.append((tokens_per_second(fit, chip, same), fit))
    as_fast = [fit for own, fit in found if own >= AS_FAST * max(speed for speed, _ in found)]
    return min(as_fast, key=lambda fit: (on_host(fit) > 0, predict(fit).peak), default=None)


def decide(workload: Workload, chip: Chip, host: float, merge: bool = False) -> Workload:
    """Return `workload` with memory=auto decided: the fastest way that fits, else the smallest."""
    # Large micro-batches come first: a GPU waits for the host between small kernels
    each = in_micro_batches(workload) if merge else [workload]
    n = each.index(workload)
    for larger in each[: n + 1]:
        plainest = replace(larger, memory=ways(larger)[0][0][0])  # nothing is faster
        if fits(plainest, room(chip), host):
            return plainest
    found = (first_that_fits(smaller, room(chip), host, chip) for smaller in each[n:])
    return next(filter(None, found), None) or smallest(each[-1], host)


def in_micro_batches(workload: Workload) -> list[Workload]:
    """Return the same step in 1, 2, ... equal micro-batches, up to one for each sequence."""
    sequences = workload.batch_size * workload.accumulate
    counts = (count for count in range(1, sequences + 1) if sequences % count == 0)
    return [replace(workload, batch_size=sequences // n, accumulate=n) for n in counts]


def memory_line(asked: MemoryConfig, decided: Workload, chip: Chip, host: float) -> str:
    """Return a line with the choice of memory=auto and its reason; "" if a policy was `asked`."""
    if asked.policy != "auto":
        return ""
    plainest = replace(decided, memory=ways(replace(decided, memory=asked))[0][0][0])
    line = f"memory=auto: {decided.memory}, "
    if decided.memory == plainest.memory:
        return f"{line}the fastest of all settings"
    line += "the fastest that fits" if fits(decided, room(chip), host) else "which takes least"
    memory = predict(plainest)
    needed, there, place = memory.peak, room(chip), ""
    if needed <= there:  # so the host has no room
        needed, there, place = on_host(plainest, memory), max(0, host - HOST_LEFT), " on the host"
    sizes = f"{needed / GIB:,.1f} GiB of {there / GIB:,.1f}{place}"
    return f"{line}; {plainest.memory} takes {sizes}"


def longest(
    candidates: Sequence[Callable[[int], Workload]],
    gpu: float,
    host: float,
    multiple: int = 128,
    limit: int = LONGEST,
    chip: Chip = CPU,
) -> Workload | None:
    """Return the step of the longest sequences that fit in one of `candidates`, functions from a
    length to the step, or None, as fast as it goes on `chip`; its devices share it evenly.
    """
    best: Workload | None = None
    for at in reversed(candidates):  # the longest come last
        unit = lcm(multiple, at(multiple).context)
        for way in reversed(ways(at(multiple))):
            lengths = range(unit, limit + 1, unit)[best.seq_len // unit if best else 0 :]
            if tokens := _longest_in(way, at, lengths, gpu, host):
                best = at(tokens)
    return best and first_that_fits(best, gpu, host, chip)


def _longest_in(
    way: Way, at: Callable[[int], Workload], lengths: range, gpu: float, host: float
) -> int:
    """Return the last of `lengths` that fits with a share on the host of `way`; 0 if none does."""

    def lacks(memory: MemoryConfig, tokens: int) -> bool:
        return not fits(replace(at(tokens), memory=memory), gpu, host)

    longest = 0
    for *_, memory in reversed(way):
        # Most ways reach no further, so the first length is tried before those in the middle.
        # Smaller shares on the host take more of the GPU.
        if not lengths or not fits(replace(at(lengths[0]), memory=memory), gpu):
            break
        if not lacks(memory, lengths[0]):
            n = bisect_left(lengths, True, key=partial(lacks, memory))
            longest, lengths = lengths[n - 1], lengths[n:]
    return longest


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
    if any(x.description.score_bytes for x in workload.attention.each):
        return "attention=flash, which keeps no seq_len × seq_len scores"
    for x in in_micro_batches(workload):
        if x.accumulate > workload.accumulate and fits(x, gpu, host):
            return f"batch_size={x.batch_size} accumulate={x.accumulate}, the same step in pieces"
    # settings that take less, if the optimizer can keep its state so
    any_memory = replace(workload, memory=MemoryConfig())
    if other := first_that_fits(any_memory, gpu, host):
        return f"memory={other.memory}"
    # shorter sequences in any way
    length = workload.seq_len
    shorter = longest([one_row(any_memory)], gpu, host, min(128, length), limit=length)
    if shorter is None:
        return f"{'' if workload.lora.rank else 'lora.rank=16 lora.base=nf4 or '}a smaller model="
    settings = f" memory={shorter.memory}" if shorter.memory != workload.memory else ""
    return f"seq_len={shorter.seq_len} batch_size=1{settings}, the longest that fits"


def faster_backend(workload: Workload, backends: Iterable[str], chip: Chip) -> str:
    """Return a line that names the fastest of `backends` if it is predicted CLEARLY_FASTER than
    the backend of `workload`, else nothing.
    """
    own, times = step_time.seconds(workload, chip), backend_seconds(workload, backends, chip)
    name = min(times, key=times.__getitem__, default="")
    if own is None or not name or own.total < CLEARLY_FASTER * times[name]:
        return ""
    return f"attention={name} is predicted {own.total / times[name] - 1:.0%} faster on this GPU"


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
        backends = [name for name in backends if DESCRIPTIONS[name].capturable] or backends
        on += " in CUDA graphs"
    times = backend_seconds(workload, backends, chip)
    if not times:
        return backends[0], f"since nothing is predicted for {chip.name}"
    name, *slower = sorted(times, key=times.__getitem__)
    if not slower:
        return name, f"the only one for this step on {on}"
    share = times[slower[0]] / times[name] - 1
    return name, f"predicted {share:.0%} faster than {slower[0]} on {on}"


def choose_layout(decided: Sequence[Workload], chip: Chip, host: float) -> tuple[Workload, str]:
    """Return the plainest that fits and is about as fast as the fastest, and why; see `decide`."""
    fit = [step for step in decided if fits(step, room(chip), host)]
    if not fit:
        # the run is still tried: a prediction is no proof
        least = min(decided, key=lambda step: predict(step).peak)
        return least, "takes least, though none is predicted to fit"
    speeds = [tokens_per_second(step, chip) for step in fit]
    as_fast = [number for number, speed in enumerate(speeds) if speed >= SURE * max(speeds)]
    # Candidates are in order: the plainest, unless a later one needs no host memory
    chosen = min(as_fast, key=lambda number: on_host(fit[number]) > 0)
    if not chosen:
        return fit[0], "the first that fits" if fit[1:] else "nothing else fits"
    if 0 in as_fast:
        return fit[chosen], f"as fast as {name_of(fit[0])}, and needs no host memory"
    return fit[chosen], f"{speeds[chosen] / speeds[0] - 1:.0%} faster than {name_of(fit[0])}"


def tokens_per_second(workload: Workload, chip: Chip, without: float = 0.0) -> float:
    """Return the speed of all devices, `without` so many seconds; 0 for an unknown chip."""
    time = step_time.seconds(workload, chip)
    return time.tokens / (time.total - without) if time is not None else 0.0


def name_of(workload: Workload) -> str:
    """Return the layout as overrides of the command line; ulysses is the usual method."""
    name, method = workload.strategy, workload.context_method
    if workload.context == 1:
        return name
    name += f" context={workload.context}"
    return name if method == "ulysses" else f"{name} context.method={method}"
