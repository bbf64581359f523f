"""The schedule of a run: its number of steps, its peak rate, and the rate of each step.

The shapes are in longctx/training/learning_rate.py, which the door lr_schedule= imports.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from longctx.config.doors import SCHEDULES
from longctx.config.train_config import TrainConfig
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import Workload

MAX_STEPS = {"cuda": 300, "cpu": 40}  # if max_steps is not given
FLOPS_ON_CPU = 8e12  # two slow cores compute so many in 4 to 5 minutes


class Schedule(NamedTuple):
    """The rates of a run; `keys` has the values of the schedule's own keys."""

    name: str
    lr: float  # peak
    max_steps: int
    warmup_steps: int
    keys: Mapping[str, Any]

    def rate(self, step: int) -> float:
        """Return the rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        # The shapes end at the last step; a stock Trainer may ask for one more
        return self.lr * SCHEDULES[self.name].share(min(step, self.max_steps - 1), self)

    def stable_steps(self) -> int:
        """Return the steps before the rate falls below its peak; all of them if it never falls."""
        after = range(self.warmup_steps, self.max_steps)
        # A bisection, since a run may have 10^9 steps
        falling = bisect.bisect_left(after, True, key=lambda step: self.rate(step) < self.lr)
        return self.warmup_steps + falling

    def check(self) -> None:
        """Raise ValueError for a decay that never begins, or begins before the peak."""
        start = self.keys.get("lr_decay_from")
        if start is not None and not self.warmup_steps <= start < self.max_steps:
            raise ValueError(
                f"lr_decay_from={start}: the rate is at its peak from step {self.warmup_steps:,} "
                f"on, and the run has {self.max_steps:,} steps; give a number between"
            )


def schedule_of(config: TrainConfig, workload: Workload) -> Schedule:
    """Return the schedule that `config` asks for, with its nulls filled in for `workload`."""
    if config.max_tokens is not None:
        steps = math.ceil(config.max_tokens / workload.tokens_per_step)
    else:
        steps = config.max_steps or default_steps(workload)
    lr = default_learning_rate(config, workload.model) if config.lr is None else config.lr
    warmup = min(200, steps // 10) if config.warmup_steps is None else config.warmup_steps
    return Schedule(config.lr_schedule, lr, steps, warmup, config.schedule_keys())


def default_steps(workload: Workload) -> int:
    """Return the default number of steps; on a CPU as many as it does in minutes."""
    if workload.device == "cuda" or workload.model.vocab_size is None:
        return MAX_STEPS[workload.device]
    flops = workload.tokens_per_step * workload.model.flops_per_token(workload.seq_len / 2)
    return max(3, min(MAX_STEPS["cpu"], int(FLOPS_ON_CPU / flops)))


def default_learning_rate(config: TrainConfig, model: GPTConfig) -> float:
    """Return the default peak rate.

    From random weights near GPT-3's table of sizes; for trained ones as in YaRN (arXiv 2309.00071);
    ten times that for LoRA: its additions begin at zero (arXiv 2405.09673). Objectives may take a
    share of it.
    """
    share = config.objective.traits.rate
    if config.lora.rank is not None:
        return share * 2e-4
    return share * (2e-5 if config.init is not None else 0.5 / model.channels)
