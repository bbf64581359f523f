"""Time that a process spends in collectives, or waiting for the others in them.

Whoever calls a collective does so inside `with measured():`, which does nothing unless a run of
several processes has started a clock. On a GPU it is the time for which the stream that computes
waits: what overlaps with computation is not counted. Events are read once the GPU has passed them,
so nothing is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch

Moment = torch.cuda.Event | float


def now(on_gpu: bool) -> Moment:
    """This moment in seconds; on a GPU, an event once it has done what it was given so far."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Laps:
    """Milliseconds from each `begin` to its `end`, on a GPU by its own clock.

    Nothing waits for the GPU before they are read.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._begun: list[Any] = []
        self._ended: list[Any] = []

    def begin(self) -> None:
        """Begin a lap with what the device is given from now on."""
        self._begun.append(now(self.on_gpu))

    def end(self) -> None:
        """End the lap that began last, once the device has done what it was given."""
        self._ended.append(now(self.on_gpu))

    def ms(self) -> list[float]:
        """Milliseconds of all laps that have ended; waits for the device."""
        laps = zip(self._begun, self._ended, strict=False)
        if not self.on_gpu:
            return [1000 * (end - begun) for begun, end in laps]
        torch.cuda.synchronize()
        return [begun.elapsed_time(end) for begun, end in laps]


Function = TypeVar("Function", bound=Callable[..., Any])


class Clock:
    """Adds up the time inside `with clock:` on `device`; inner ones count with the outermost."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._depth = 0
        self._aside = False
        self._begin: Moment = 0.0
        self._mark: Moment | None = None
        self._spans: deque[tuple[Moment, Moment]] = deque()  # that the GPU may not have passed

    def __enter__(self) -> None:
        if self._depth == 0:
            self._begin = self._now()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._add(self._begin, self._now())

    def mark(self, *_: object) -> None:
        """From here on, or from a later mark on, a wait may last until `until_now`."""
        self._mark = self._now()

    def until_now(self) -> None:
        """The wait that the last mark began, if there was one, ends."""
        if self._mark is not None:
            self._add(self._mark, self._now())
            self._mark = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is inside counts nothing."""
        self._aside = True
        yield
        self._aside = False

    def take(self) -> float:
        """Seconds since the last call; waits for the device."""
        self._read(wait=True)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _now(self) -> Moment:
        return now(self.device.type == "cuda")

    def _add(self, begin: Moment, end: Moment) -> None:
        if not self._aside:
            self._spans.append((begin, end))
            self._read(wait=False)

    def _read(self, wait: bool) -> None:
        while self._spans:
            begin, end = self._spans[0]
            if isinstance(begin, float) and isinstance(end, float):
                self._seconds += end - begin
            else:
                assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
                if wait:
                    end.synchronize()
                elif not end.query():
                    return
                self._seconds += begin.elapsed_time(end) / 1000
            self._spans.popleft()


_clock: Clock | None = None
_NOTHING = nullcontext()


def start(clock: Clock | None) -> None:
    """Measure with `clock` from now on; None: no more."""
    global _clock
    _clock = clock


def measured() -> AbstractContextManager[None]:
    """Around a collective on the device of the run; never inside code that is compiled."""
    return _NOTHING if _clock is None else _clock


def measuring(function: Function) -> Function:
    """`function` with all of it measured."""

    @wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with measured():
            return function(*args, **kwargs)

    return inside  # type: ignore[return-value]
