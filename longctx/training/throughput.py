"""The cost of a step: tokens per second, model FLOP/s utilization, memory, waiting for data.

MFU counts the FLOPs of the model (PaLM, arXiv 2204.02311, appendix B) against the chip's dense bf16
peak, under precision=fp8 too, so that runs compare. Padding, hidden pairs and recomputation do not
count. A chip that is not in the table gets no MFU, not a guess.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longctx.attention.communication import Moment, elapsed_ms, now
from longctx.config.fields import refuse
from longctx.parallel.mesh import Parallel
from longctx.spec import hardware
from longctx.spec.step import Workload
from longctx.training.batches import MicroBatch
from longctx.training.memory import measured


class Meter:
    """Sums since the last logged row, on this rank; `row` adds up the ranks and begins again.

    The loss stays on the device until then, so that only a logged step waits for it. A checkpoint
    has the sums, so that rows continue as if never stopped.
    """

    def __init__(
        self, workload: Workload, parallel: Parallel, figures: tuple[str, ...] = ()
    ) -> None:
        self.workload, self.parallel = workload, parallel
        self.names = figures  # of the objective
        self.device, self.on_gpu = parallel.device, parallel.device.type == "cuda"
        self.marks: list[tuple[str, Moment]] = []  # the ends of the parts of a measured step
        self.tokens_seen = 0  # over all ranks, since the run began, padding left out
        # Of training before this process, if the run was resumed, maybe on other devices
        self.seconds = self.device_seconds = 0.0
        self.spent = 0.0  # seconds of the window before this process
        self.flops_of_device: float | None = None  # peak per second
        if self.on_gpu:
            name = torch.cuda.get_device_name(self.device)
            self.flops_of_device = hardware.chip(name, 0).flops
        self._begin_window(0.0)
        self.begin()

    def _begin_window(self, start: float) -> None:
        """Forget the steps since the last row."""
        self.window = start
        self.steps = 0
        self.steps_before = 0  # those of them before this process
        # Loss, sums of the figures, their counts, and steps whose loss was finite on a rank
        self.sums = torch.zeros(2 + 2 * len(self.names), dtype=torch.float64, device=self.device)
        # Target tokens, real tokens, all tokens, pairs; on the host
        self.counts = torch.zeros(4, dtype=torch.float64)
        self.waited = 0.0  # seconds for data

    def begin(self) -> None:
        """Start the clock of the next step."""
        self.started = self.idle_since = time.perf_counter()
        self.window = self.started - self.spent
        if self.parallel.clock is not None:
            self.parallel.clock.take()  # ranks have waited for weights and data before

    def waits(self) -> None:
        """Note that a step has ended, and the next batch is awaited."""
        self.idle_since = time.perf_counter()

    def batch_arrived(self, measures: bool) -> None:
        """Note that the batch of the next step is here; its parts are timed if it `measures`."""
        self.waited += time.perf_counter() - self.idle_since
        self.marks = [("", now(self.on_gpu))] if measures else []

    def mark(self, part: str) -> None:
        """End `part` ("forward", "backward", "optimizer") of a measured step; the next begins."""
        if self.marks:
            self.marks.append((part, now(self.on_gpu)))

    def add(self, batch: list[MicroBatch], loss: Tensor, figures: Tensor | None = None) -> None:
        """Count one optimizer step; `loss` is the sum over its target tokens on this rank, and
        `figures` the sums and counts of the objective's.
        """
        self.sums[0] += loss.double()
        self.sums[-1] += self.sums[0].isfinite()
        if figures is not None:
            self.sums[1:-1] += figures.flatten() * self.parallel.counted_once(1)
        self.steps += 1
        for micro in batch:
            counted = micro.scored, micro.real, micro.tokens.numel(), micro.pairs
            self.counts += torch.tensor(counted) * self.parallel.counted_once(1)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep the time spent inside out of the steps."""
        start, clock = time.perf_counter(), self.parallel.clock
        with nullcontext() if clock is None else clock.aside():
            yield
        self.window += time.perf_counter() - start  # as if the window had begun later

    def row(self, grad_norm: Tensor) -> dict[str, Any]:
        """Return the measured part of a row of metrics.jsonl; waits for the device.

        `loss` is the mean over the target tokens of the window, absent if it has none. Tokens per
        second count real tokens of all ranks. `padding_share` is of all tokens. `data_wait_ms` is
        the time per step between one step and the arrival of the next batch.
        """
        # The sums wait for the device, so the clock is read after them
        (loss, *figures, finite), (scored, real, everything, pairs) = self._over_ranks()
        # From this step back to the first whose loss is not finite, if one is not
        self.back = self.steps - self.steps_before - int(finite) // self.parallel.ranks - 1
        ended = time.perf_counter()
        elapsed = max(ended - self.window, 1e-9)
        self.tokens_seen += int(real)
        row: dict[str, Any] = {"tokens_seen": self.tokens_seen}
        if scored:
            row["loss"] = loss / scored
        row |= means(self.names, figures) | {
            "grad_norm": float(grad_norm),  # the same on every rank
            "tokens_per_second": real / elapsed,
            "ms_per_step": 1000 * elapsed / self.steps,
            "data_wait_ms": 1000 * self.waited / self.steps,
            "padding_share": 1 - real / everything,
        }
        if self.flops_of_device is not None:
            model = self.workload.model
            adapters = self.workload.lora.parameters(model, of_token=True)
            # Of forward and backward, for tokens that see so many pairs
            flops = real * model.flops_per_token(pairs / max(real, 1.0), adapters)
            row["mfu"] = flops / (elapsed * self.flops_of_device * self.parallel.ranks)
        if self.parallel.clock is not None:
            row["tokens_per_second_per_device"] = real / elapsed / self.parallel.ranks
            # In the mean over the ranks. Nobody measures the waits of FSDP2's own collectives
            here = self.steps - self.steps_before
            waits = torch.tensor(self.parallel.clock.take(), device=self.device)
            waits = self.parallel.all_reduce_sum(waits.double()) / self.parallel.ranks
            row["communication_ms"] = 1000 * float(waits) / max(here, 1)
        row |= measured(self.device) | self.times(ended)
        # Of the last step: each part over its micro-batches. The sums have waited for its events
        for (_, begin), (part, end) in pairwise(self.marks):
            row[f"{part}_ms"] = row.get(f"{part}_ms", 0.0) + elapsed_ms(begin, end)
        self._begin_window(ended)
        return row

    def times(self, until: float) -> dict[str, float]:
        """Return the seconds since the run began, and their sum over its devices."""
        here = until - self.started
        all_devices = self.device_seconds + here * self.parallel.ranks
        return {"seconds": self.seconds + here, "device_seconds": all_devices}

    def state(self) -> dict[str, Any]:
        """Return the plain values for a checkpoint, summed over the ranks; all ranks call it."""
        (loss, *figures, _), counts = self._over_ranks()
        ended = time.perf_counter()
        return {
            "tokens_seen": self.tokens_seen,
            **self.times(ended),
            "spent": ended - self.window if self.steps else 0.0,
            "waited": self.waited,
            "steps": self.steps,
            "counts": [int(count) for count in counts],
            "loss": loss,
            "figures": figures,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`; rank 0 takes the sums over all ranks."""
        self.tokens_seen, self.seconds = int(state["tokens_seen"]), float(state["seconds"])
        self.device_seconds = float(state.get("device_seconds", self.seconds))
        self.spent, self.waited = float(state["spent"]), float(state["waited"])
        self.steps = self.steps_before = int(state["steps"])
        refuse((not 0 <= self.steps < 2**53, "meter.steps is no number of steps"))
        # The saved sums are over all ranks, so only one rank may add them
        if self.parallel.is_first:
            self.counts += torch.tensor(state["counts"])
            saved = torch.tensor([state["loss"], *state["figures"]], dtype=torch.float64)
            self.sums[:-1].copy_(saved)

    def _over_ranks(self) -> tuple[list[float], list[float]]:
        """Return sums and counts of this window over all ranks; waits for the device."""
        # One collective for all of them
        sums = torch.cat([self.sums, self.counts.to(self.device)])
        totals = self.parallel.all_reduce_sum(sums).tolist()
        return totals[: len(self.sums)], totals[len(self.sums) :]


def means(names: tuple[str, ...], sums_and_counts: list[float]) -> dict[str, float]:
    """Return the mean of each figure that was counted."""
    half = len(names)
    each = zip(names, sums_and_counts[:half], sums_and_counts[half:], strict=True)
    row = {name: total / count for name, total, count in each if count}
    # Of unpaired answers, as TRL computes it
    if "rewards/margins" not in row and {"rewards/chosen", "rewards/rejected"} <= row.keys():
        row["rewards/margins"] = row["rewards/chosen"] - row["rewards/rejected"]
    return row
