"""Time competing calls as medians over rounds.

In a round every call runs once, after an untimed run of its own. On a GPU the device sleeps while a
round is handed to it. So it never waits for Python, and events between the calls measure the
device's own time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")
CYCLES = 2e9  # of a GPU in a second, about
LONGEST_SLEEP = 0.05  # seconds


def medians(
    calls: Mapping[Key, Callable[[], Any]], repeats: int, seconds: float = float("inf")
) -> dict[Key, float]:
    """Return the median milliseconds of each call; see `samples`."""
    return {key: median(times) for key, times in samples(calls, repeats, seconds).items()}


def spread(times: Sequence[float]) -> float:
    """Return the distance from the first to the last tenth of `times`, as a share of the median."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return (ordered[-1 - tenth] - ordered[tenth]) / median(ordered)


def samples(
    calls: Mapping[Key, Callable[[], Any]], repeats: int, seconds: float = float("inf")
) -> dict[Key, list[float]]:
    """Return the milliseconds of each call on the current device, one for each round.

    There are `repeats` rounds, or fewer if those last longer than `seconds`, but three.
    """
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for call in calls.values():
        for _ in range(2):
            call()
    synchronize()
    started = time.perf_counter()
    _round(calls, list(calls))
    issued = time.perf_counter() - started
    synchronize()
    one = time.perf_counter() - started
    spans: dict[Key, list[tuple[Any, Any]]] = {key: [] for key in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(max(3, int(min(repeats, seconds / max(one, 1e-9))))):
        if torch.cuda.is_available():
            torch.cuda._sleep(int(min(1.5 * issued, LONGEST_SLEEP) * CYCLES))
        # At its power limit a GPU is faster after a shorter call, so the order changes
        shuffle(order)
        for key, span in _round(calls, order).items():
            spans[key].append(span)
    synchronize()
    if torch.cuda.is_available():
        return {key: [start.elapsed_time(end) for start, end in of] for key, of in spans.items()}
    return {key: [(end - start) * 1e3 for start, end in of] for key, of in spans.items()}


def _round(calls: Mapping[Key, Callable[[], Any]], order: list[Key]) -> dict[Key, tuple[Any, Any]]:
    """Return (start, end) of every call: events of a GPU, else seconds."""
    marks: dict[Key, tuple[Any, Any]] = {}
    for key in order:
        if not torch.cuda.is_available():
            begun = time.perf_counter()
            calls[key]()
            marks[key] = begun, time.perf_counter()
            continue
        calls[key]()  # untimed: clock and caches are then as this call itself leaves them
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[key]()
        end.record()
        marks[key] = start, end
    return marks
