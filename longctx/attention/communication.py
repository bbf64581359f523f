"""Time that a process spends in collectives, or waiting for other ranks in them.

Collectives are called inside `with measured():`. It does nothing unless a run of several processes
has started a clock. On a GPU only the waits of the computing stream count:
communication that overlaps with computation is free. Events are read once the GPU has passed them,
so nothing waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

Moment = torch.cuda.Event | float


def now(on_gpu: bool) -> Moment:
    """Return the time in seconds, or on a GPU an event behind all work that it has been given."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(begin: Moment, end: Moment) -> float:
    """Return the milliseconds between two moments of one kind."""
    if isinstance(begin, float) or isinstance(end, float):
        return 1000 * (end - begin)  # type: ignore[operator]
    return begin.elapsed_time(end)


class Clock:
    """Adds up the time inside `with clock:` on `device`; an inner block counts with its outer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._depth = 0
        self._is_aside = False
        self._begin: Moment = 0.0
        self._mark: Moment | None = None
        # begin and end of spans that the GPU may not have passed yet
        self._spans: deque[tuple[Moment, Moment]] = deque()

    def __enter__(self) -> None:
        if self._depth == 0:
            self._begin = self._now()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._add(self._begin, self._now())

    def mark(self, *_: object) -> None:
        """Note that a wait may begin here; a later mark replaces this one."""
        self._mark = self._now()

    def until_now(self) -> None:
        """Count the time since the last mark, if there is one."""
        if self._mark is not None:
            self._add(self._mark, self._now())
            self._mark = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count nothing inside this block."""
        self._is_aside = True
        yield
        self._is_aside = False

    def take(self) -> float:
        """Return the seconds since the last call; wait for the device."""
        self._read(wait=True)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _now(self) -> Moment:
        return now(self.device.type == "cuda")

    def _add(self, begin: Moment, end: Moment) -> None:
        if not self._is_aside:
            self._spans.append((begin, end))
            self._read(wait=False)

    def _read(self, wait: bool) -> None:
        while self._spans:
            begin, end = self._spans[0]
            if wait and not isinstance(end, float):
                end.synchronize()
            if not (isinstance(end, float) or end.query()):
                return
            self._seconds += elapsed_ms(begin, end) / 1000
            self._spans.popleft()


_clock: Clock | None = None


def start(clock: Clock | None) -> None:
    """Measure with `clock` from now on; None stops measuring."""
    global _clock
    _clock = clock


@contextmanager
def measured() -> Iterator[None]:
    """Measure a collective of the run inside this block, never inside compiled code."""
    with nullcontext() if _clock is None else _clock:
        yield
