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

import math
from typing import TYPE_CHECKING

from longctx.config.doors import SCHEDULES, ScheduleTraits

if TYPE_CHECKING:
    from longctx.training.schedule import Schedule

__all__ = ["ScheduleTraits", "register"]

DECAY_SHARE = 0.2  # of the steps: where arXiv 2405.18392 finds no more gain
register = SCHEDULES.register


def progress(step: int, run: Schedule) -> float:
    """Return the share of the steps after the warm-up that are before `step`, 1 at the last."""
    return (step - run.warmup_steps) / max(1, run.max_steps - 1 - run.warmup_steps)


def cosine(step: int, run: Schedule) -> float:
    """Fall slowly, then fast, then slowly again."""
    least: float = run.keys["min_lr_ratio"]
    return least + (1 - least) * (0.5 * (1 + math.cos(math.pi * progress(step, run))))


def linear(step: int, run: Schedule) -> float:
    """Fall by the same amount in each step."""
    return float(1 - (1 - run.keys["min_lr_ratio"]) * progress(step, run))


def wsd(step: int, run: Schedule) -> float:
    """Stay at the peak, then fall: warm-up, stable, decay."""
    least, start = run.keys["min_lr_ratio"], run.keys["lr_decay_from"]
    if start is None:
        share = run.keys["lr_decay_share"] or DECAY_SHARE
        # The warm-up comes first, also in a run that is all decay
        start = max(run.warmup_steps, run.max_steps - max(1, round(share * run.max_steps)))
    if step < start:
        return 1.0
    decay = (step + 1 - start) / (run.max_steps - start)
    fallen = math.sqrt(decay) if run.keys["lr_decay_shape"] == "1-sqrt" else decay
    return float(1 - (1 - least) * fallen)


def inverse_sqrt(step: int, run: Schedule) -> float:
    """Fall as the root of the steps done, which need no end: the warm-up is its scale."""
    return math.sqrt(max(1, run.warmup_steps) / (step + 1))


def constant(step: int, run: Schedule) -> float:
    """Stay at the peak."""
    return 1.0


LEAST = {"min_lr_ratio": 0.1}
DECAY = {"lr_decay_share": None, "lr_decay_from": None, "lr_decay_shape": "1-sqrt"}
register("cosine", ScheduleTraits(cosine, LEAST))
register("linear", ScheduleTraits(linear, LEAST))
register("wsd", ScheduleTraits(wsd, LEAST | DECAY))
register("inverse_sqrt", ScheduleTraits(inverse_sqrt))
register("constant", ScheduleTraits(constant))
