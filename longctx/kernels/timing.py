"""Laps: milliseconds between two points of a step, on a GPU by its own clock."""

from __future__ import annotations

import time
from typing import Any

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
