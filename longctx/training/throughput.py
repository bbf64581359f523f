"""What a step costs: tokens per second, model FLOP/s utilization, memory, waiting for data.

MFU counts the FLOPs that the model needs (PaLM, arXiv 2204.02311, appendix B; pairs that the mask
hides and padding are not work, nor is recomputation) against the chip's dense bf16 peak. A chip
that is not in the table gets no MFU, not a guess.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.model import GPTConfig
from longctx.planner.hardware import peak_flops
from longctx.training.batches import StepBatch


@dataclass
class Meter:
    """Sums since the last logged row, on this rank; `row` adds up the ranks and starts the next
    window.

    The loss stays on the device until then, so that only a logged step waits for it.
    """

    model: GPTConfig
    device: torch.device
    adapters: int = 0  # trained weights of LoRA, where the model's own rest
    tokens_seen: int = 0  # over all ranks, since the beginning of the run, padding left out
    seconds: float = 0.0  # training time before this process, where the run was resumed
    waited: float = 0.0
    spent: float = 0.0  # of this window, seconds of steps before this process
    steps: int = 0
    counts: list[int] = field(
        default_factory=lambda: [0, 0, 0, 0]
    )  # scored, real, all tokens, pairs
    loss: Tensor = field(init=False)
    peak: float | None = field(init=False)  # FLOP/s of one device
    started: float = field(default_factory=time.perf_counter)
    window: float = field(default_factory=time.perf_counter)
    aside: float = 0.0  # of this window, seconds spent on validation and checkpoints

    def __post_init__(self) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.peak = (
            peak_flops(torch.cuda.get_device_name(self.device))
            if self.device.type == "cuda"
            else None
        )

    def begin(self) -> None:
        """The next step starts now."""
        self.started = time.perf_counter()
        self.window, self.aside = self.started - self.spent, 0.0

    def add(self, batch: StepBatch, loss: Tensor) -> None:
        """Count one optimizer step; `loss` is the sum over its scored tokens on this rank."""
        self.loss += loss.double()
        self.steps += 1
        for micro in batch.micro:
            counted = (micro.scored, micro.real, micro.tokens.numel(), micro.pairs)
            self.counts = [total + n for total, n in zip(self.counts, counted, strict=True)]

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Time spent inside is not part of a step."""
        start = time.perf_counter()
        yield
        self.aside += time.perf_counter() - start

    def row(self, grad_norm: Tensor) -> dict[str, Any]:
        """The measured part of a row of metrics.jsonl; waits for the device.

        `loss` is the mean over the scored tokens of the window, absent where it has none; tokens
        per second count real tokens of all ranks; `padding_share` is of all tokens; `data_wait_ms`
        is the time per step between one step and the arrival of the next batch.
        """
        loss, scored, real, everything, pairs = self._over_ranks()
        now = time.perf_counter()
        elapsed = max(now - self.window - self.aside, 1e-9)
        self.tokens_seen += int(real)
        row = {
            "tokens_seen": self.tokens_seen,
            **({"loss": loss / scored} if scored else {}),
            "grad_norm": float(grad_norm),  # the same on every rank
            "tokens_per_second": real / elapsed,
            "ms_per_step": 1000 * elapsed / self.steps,
            "data_wait_ms": 1000 * self.waited / self.steps,
            "padding_share": 1 - real / everything,
        }
        if self.peak is not None:
            row["mfu"] = self.flops(real, pairs) / elapsed / (self.peak * _ranks())
        row |= memory(self.device) | {"seconds": self.seconds + now - self.started}
        self.loss.zero_()
        self.steps, self.counts, self.waited, self.aside, self.window = (
            0,
            [0, 0, 0, 0],
            0.0,
            0.0,
            now,
        )
        return row

    def flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of forward and backward for `tokens` that see `pairs` in all."""
        return tokens * self.model.flops_per_token(pairs / max(tokens, 1.0), self.adapters)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold so that the rows after it are those of the uninterrupted run;
        every rank calls it.
        """
        loss, *counts = self._over_ranks()
        now = time.perf_counter()
        return {
            "tokens_seen": self.tokens_seen,
            "seconds": self.seconds + now - self.started,
            "spent": now - self.window - self.aside if self.steps else 0.0,
            "waited": self.waited,
            "steps": self.steps,
            "counts": [int(count) for count in counts],
            "loss": loss,
        }

    def restore(self, state: dict[str, Any], first_rank: bool = True) -> None:
        """Continue from `state`; what it has summed over the ranks, the first rank carries."""
        self.tokens_seen, self.seconds, self.steps = (
            state["tokens_seen"],
            state["seconds"],
            state["steps"],
        )
        self.spent, self.waited = state["spent"], state["waited"]
        if first_rank:
            self.counts = list(state["counts"])
            self.loss.fill_(state["loss"])

    def _over_ranks(self) -> list[float]:
        """Loss and counts of this window, summed over all ranks; waits for the device."""
        sums = torch.tensor([0.0, *self.counts], dtype=torch.float64, device=self.device)
        sums[0] = self.loss
        if _ranks() > 1:
            dist.all_reduce(sums)
        return sums.tolist()


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def memory(device: torch.device) -> dict[str, float]:
    """Peak memory in GiB: of torch's allocator on a GPU (in use, and reserved), of the whole
    process on a CPU.
    """
    if device.type == "cuda":
        return {
            "memory_peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    unit = 1 if sys.platform == "darwin" else 1024
    return {"process_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}


def resident() -> float:
    """Bytes of memory that this process has now; where that cannot be read, the most that it ever
    had.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return memory(torch.device("cpu"))["process_peak_gib"] * 2**30
