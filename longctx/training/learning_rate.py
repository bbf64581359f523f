"""Learning-rate schedules: `lr_schedule=NAME`. Torch-free.

The rate grows linearly to `lr` over the w steps of the warm-up. From there a schedule returns the
rate of step n, counted from 0, as a share of `lr`. N is the number of steps, m = min_lr_ratio:

    cosine         m + (1 - m) · (1 + cos πp) / 2,  p = (n - w) / (N - 1 - w)     (arXiv 1608.03983)
    linear         1 - (1 - m) · p                                                (arXiv 2310.07831)
    wsd            1 for the first s steps, then  m + (1 - m) · (1 - √d)  or  m + (1 - m) · (1 - d),
                   d = (n + 1 - s) / (N - s)                          (arXiv 2404.06395, 2405.18392)
    inverse_sqrt   √(w / (n + 1))                                     (arXiv 1706.03762, 1910.10683)
    constant       1

The rate depends on the number of a step alone, so a resumed run needs no state for it. A schedule
of a few lines needs no file of its own: it is a function with a call of `register`, which names
the keys that it reads.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from longctx.config.doors import SCHEDULES, ScheduleTraits
from longctx.config.train_config import TrainConfig
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import Workload

__all__ = ["Schedule", "ScheduleTraits", "register", "schedule_of"]

MAX_STEPS = {"cuda": 300, "cpu": 40}  # if max_steps is not given
FLOPS_ON_CPU = 8e12  # two slow cores compute so many in 4 to 5 minutes
DECAY_SHARE = 0.2  # of the steps: where arXiv 2405.18392 finds no more gain
register = SCHEDULES.register


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
        return self.lr * float(SCHEDULES[self.name].share(min(step, self.max_steps - 1), self))

    def stable_steps(self) -> int:
        """Return the steps before the rate falls below its peak; all of them if it never falls."""
        after = range(self.warmup_steps, self.max_steps)
        # A bisection, since a run may have 10^9 steps
        falling = bisect.bisect_left(after, True, key=lambda step: self.rate(step) < self.lr)
        return self.warmup_steps + falling

    def check(self, config: TrainConfig) -> None:
        """Raise ValueError for a new run whose warm-up takes more than all steps, a decay that
        never begins or begins before the peak, or a seq_len_schedule of all steps.
        """
        # The keys of a resumed run are of more steps, if it has fewer now
        if config.resume is None and self.max_steps < (config.warmup_steps or 0):
            why = f"max_steps={self.max_steps} would end below lr; give fewer,"
            raise ValueError(f"warmup_steps={config.warmup_steps}: {why} or give more steps")
        start = self.keys.get("lr_decay_from")
        if start is not None and not self.warmup_steps <= start < self.max_steps:
            ends = f"warmup_steps={self.warmup_steps} to below max_steps={self.max_steps}"
            raise ValueError(f"lr_decay_from={start}: give a number from {ends}")
        stages = config.seq_len_schedule or []
        if sum(steps for _, steps in stages) >= self.max_steps:
            why = f"takes all of max_steps={self.max_steps}; leave some for seq_len"
            raise ValueError(f"seq_len_schedule={stages}: {why}")

    def change(self, before: Schedule, steps_done: int, setting: str) -> str:
        """Return a line about the next step's rate if it is not that of the schedule `before`;
        raise ValueError, which names `setting`, if it falls in the steps done, in which it did not.
        """
        stable = self.stable_steps()
        if stable < min(steps_done, before.stable_steps()):
            raise ValueError(
                f"{setting}: lr_schedule={self.name} would have begun to fall after step "
                f"{stable:,}, but the run has {steps_done:,} at its peak; to begin here, give "
                f"lr_schedule=wsd lr_decay_from={steps_done}"
            )
        if self.rate(steps_done) == before.rate(steps_done):
            return ""
        rates = f"{before.rate(steps_done - 1):.3g} until now, {self.rate(steps_done):.3g}"
        return f"{rates} in the next step: max_steps or lr_schedule has changed"


def schedule_of(config: TrainConfig, workload: Workload) -> Schedule:
    """Return the schedule that `config` asks for, with its nulls filled in for `workload`."""
    steps = config.max_steps or default_steps(workload)
    if config.max_tokens is not None:
        steps = math.ceil(config.max_tokens / workload.tokens_per_step)
    lr = default_learning_rate(config, workload.model) if config.lr is None else config.lr
    warmup = min(200, steps // 10) if config.warmup_steps is None else config.warmup_steps
    return Schedule(config.lr_schedule, lr, steps, warmup, keys_of(config))


def keys_of(config: TrainConfig) -> dict[str, Any]:
    """Return the keys that lr_schedule has, with its defaults in place of nulls."""
    defaults = SCHEDULES[config.lr_schedule].keys
    given = {name: getattr(config, name) for name in defaults}
    return {key: defaults[key] if value is None else value for key, value in given.items()}


def default_steps(workload: Workload) -> int:
    """Return the default number of steps; on a CPU as many as it does in minutes."""
    if workload.device == "cuda" or workload.model.vocab_size is None:
        return MAX_STEPS[workload.device]
    flops = workload.tokens_per_step * workload.model.flops_per_token(workload.seq_len / 2)
    return max(3, min(MAX_STEPS["cpu"], int(FLOPS_ON_CPU / flops)))


def default_learning_rate(config: TrainConfig, model: GPTConfig) -> float:
    """Return the default peak rate."""
    # From random weights near GPT-3's table of sizes; for trained ones as in YaRN (arXiv
    # 2309.00071); ten times that for LoRA: its additions begin at zero (arXiv 2405.09673).
    # Objectives may take a part of it.
    divisor = 2 * model.channels if config.init is None else 50_000
    divisor = divisor if config.lora.rank is None else 5_000
    return 1 / (divisor * config.objective.traits.slower)  # exactly 1e-6 of dpo


def progress(step: int, schedule: Schedule) -> float:
    """Return the share of the steps after the warm-up that are before `step`, 1 at the last."""
    return (step - schedule.warmup_steps) / max(1, schedule.max_steps - 1 - schedule.warmup_steps)


def cosine(step: int, schedule: Schedule) -> float:
    """Fall slowly, then fast, then slowly again."""
    least: float = schedule.keys["min_lr_ratio"]
    return least + (1 - least) * (0.5 * (1 + math.cos(math.pi * progress(step, schedule))))


def linear(step: int, schedule: Schedule) -> float:
    """Fall by the same amount in each step."""
    return float(1 - (1 - schedule.keys["min_lr_ratio"]) * progress(step, schedule))


def wsd(step: int, schedule: Schedule) -> float:
    """Stay at the peak, then fall: warm-up, stable, decay."""
    least, start = schedule.keys["min_lr_ratio"], schedule.keys["lr_decay_from"]
    if start is None:
        steps = round((schedule.keys["lr_decay_share"] or DECAY_SHARE) * schedule.max_steps)
        # The warm-up comes first, also in a run that is all decay
        start = max(schedule.warmup_steps, schedule.max_steps - max(1, steps))
    if step < start:
        return 1.0
    decay = (step + 1 - start) / (schedule.max_steps - start)
    fallen = math.sqrt(decay) if schedule.keys["lr_decay_shape"] == "1-sqrt" else decay
    return float(1 - (1 - least) * fallen)


def inverse_sqrt(step: int, schedule: Schedule) -> float:
    """Fall as the root of the steps done, which need no end: the warm-up is its scale."""
    return math.sqrt(max(1, schedule.warmup_steps) / (step + 1))


LEAST = {"min_lr_ratio": 0.1}
DECAY = {"lr_decay_share": None, "lr_decay_from": None, "lr_decay_shape": "1-sqrt"}
register("cosine", ScheduleTraits(cosine, LEAST))
register("linear", ScheduleTraits(linear, LEAST))
register("wsd", ScheduleTraits(wsd, LEAST | DECAY))
register("inverse_sqrt", ScheduleTraits(inverse_sqrt))
register("constant", ScheduleTraits(lambda step, schedule: 1.0))
