"""Where the time of a step goes: forward, backward, optimizer. Measured between the hooks that
Lightning calls anyway.

On a GPU the marks are events in its stream, read when the step is logged, where the run waits for
the GPU in any case. Only the last step before a row is measured, so that all others run as if
nothing did.
"""

from __future__ import annotations

import time

import torch


class StepSplit:
    """Marks of one optimizer step; `row` tells the milliseconds of each part."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []
        self._wanted = False

    def begin(self, wanted: bool) -> None:
        """A step begins; `wanted` says whether it is measured."""
        self._wanted = wanted
        self._marks.clear()
        self.mark("begin")

    def mark(self, part: str) -> None:
        """`part` ("forward", "backward", "optimizer") ends here; it began where the part before it
        ended.
        """
        if not self._wanted:
            return
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def row(self) -> dict[str, float]:
        """`<part>_ms` of the step, summed over its micro-batches; {} where it was not measured.
        Waits for the device.
        """
        found: dict[str, float] = {}
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(start, float) and isinstance(end, float):
                ms = 1000 * (end - start)
            else:
                assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
                end.synchronize()
                ms = start.elapsed_time(end)
            found[f"{part}_ms"] = found.get(f"{part}_ms", 0.0) + ms
        self._marks.clear()
        return found
