"""Layouts: how the devices of a run share its model and its sequences, and the fastest way. No
torch.

A layout is a strategy, a degree of context parallelism and its method. Open layouts have one order,
the plainest first: fewer devices per sequence, ulysses before allgather, ddp before fsdp. A later
one is chosen only if the earlier do not fit, are clearly slower, or need host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm
from typing import NamedTuple

from longctx.config.layout_config import STRATEGIES, StrategyConfig
from longctx.config.model_config import GPTConfig
from longctx.config.train_config import TrainConfig
from longctx.planner import fitting
from longctx.planner.hardware import Chip
from longctx.planner.peak_memory import predict
from longctx.planner.workload import Workload

SURE = 0.95  # a speed of less than this share of another is slower


class Choice(NamedTuple):
    """A step with its layout decided, and the reason in a few words."""

    workload: Workload
    reason: str


def each(config: TrainConfig, model: GPTConfig) -> list[TrainConfig]:
    """Return `config` in every layout that it leaves open for `model`, the plainest first."""
    name = config.strategy.name
    shared = [name for name in STRATEGIES if name != "none"]
    strategies = shared if name == "auto" and config.devices > 1 else [name]
    takes_intervals = config.attention.description.takes_intervals
    return [
        replace(config, context=context, strategy=StrategyConfig(strategy))
        for context in config.context.each(config.devices, model.heads, takes_intervals)
        for strategy in strategies
    ]


def choose(candidates: Sequence[Workload], chip: Chip, host: float, merge: bool = False) -> Choice:
    """Return the plainest candidate that fits and is about as fast as the fastest.

    Memory and, with `merge`, micro-batches are decided for each, see `fitting.decide`.
    """
    decided = [fitting.decide(candidate, chip, host, merge) for candidate in candidates]
    fit = [step for step in decided if fitting.fits(step, fitting.room(chip), host)]
    if not fit:
        # the run is still tried: a prediction is no proof
        least = min(decided, key=lambda step: predict(step).peak)
        return Choice(least, "takes least, though none is predicted to fit")
    speeds = [tokens_per_second(step, chip) for step in fit]
    as_fast = [number for number, speed in enumerate(speeds) if speed >= SURE * max(speeds)]
    # Candidates are in order: the plainest, unless a later one needs no host memory
    chosen = min(as_fast, key=lambda number: fitting.on_host(fit[number]) > 0)
    if len(fit) == 1:
        reason = "nothing else fits"
    elif not speeds[0]:
        reason = "the first that fits"
    elif chosen and 0 in as_fast:
        reason = f"as fast as {name_of(fit[0])}, and needs no host memory"
    elif chosen:
        reason = f"{speeds[chosen] / speeds[0] - 1:.0%} faster than {name_of(fit[0])}"
    elif fit[0] is not decided[0]:
        reason = f"{name_of(decided[0])} does not fit"
    else:
        reason = f"no other is {1 - SURE:.0%} faster"
    return Choice(fit[chosen], reason)


def longest(
    candidates: Sequence[Callable[[int], Workload]], chip: Chip, host: float, multiple: int = 128
) -> Workload | None:
    """Return the step of the longest sequences that fit in one of `candidates`, or None.

    A candidate gives the step for a length. All devices that share a sequence hold the same number
    of its tokens.
    """
    best: Workload | None = None
    for at in reversed(candidates):  # the longest come last
        # ranks have equal shares
        unit = lcm(multiple, at(multiple).context)
        longer = unit if best is None else (best.seq_len // unit + 1) * unit
        if fitting.first_that_fits(at(longer), fitting.room(chip), host):
            best = fitting.longest(at, fitting.room(chip), host, unit)
    return best


def tokens_per_second(workload: Workload, chip: Chip) -> float:
    """Return the speed of all devices together; 0 for an unknown chip."""
    time = fitting.seconds(workload, chip)
    return time.tokens / time.total if time is not None else 0.0


def name_of(workload: Workload) -> str:
    """Return the layout as overrides of the command line; ulysses is the usual method."""
    name, method = workload.strategy, workload.context_method
    if workload.context == 1:
        return name
    name += f" context={workload.context}"
    return name if method == "ulysses" else f"{name} context.method={method}"
