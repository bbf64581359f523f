"""Learning-rate schedules: `lr_schedule=NAME`. Torch-free.

The rate grows linearly to `lr` over `warmup_steps`. From there a schedule returns it as a share of
`lr`, given the progress p to the last step, 0 to 1, and m = min_lr:

    cosine      m + (1 - m) · (1 + cos πp) / 2      (arXiv 1608.03983)
    linear      1 - (1 - m) · p                     (arXiv 2310.07831)
    constant    1

The rate depends on the number of a step alone, so a resumed run needs no state for it. A new
schedule is a function with a call of `register`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from longctx.config.doors import SCHEDULES

if TYPE_CHECKING:
    from longctx.training.run import Run

register = SCHEDULES.register


def cosine(progress: float, min_lr: float) -> float:
    """Fall slowly, then fast, then slowly again."""
    return min_lr + (1 - min_lr) * (0.5 * (1 + math.cos(math.pi * progress)))


def linear(progress: float, min_lr: float) -> float:
    """Fall by the same amount in each step."""
    return 1 - (1 - min_lr) * progress


def constant(progress: float, min_lr: float) -> float:
    """Stay at the peak."""
    return 1.0


register("cosine", cosine)
register("linear", linear)
register("constant", constant)


def learning_rate(step: int, run: Run) -> float:
    """Return the rate of step `step`, counted from 0."""
    if step < run.warmup_steps:
        return run.lr * (step + 1) / run.warmup_steps
    progress = (step - run.warmup_steps) / max(1, run.max_steps - 1 - run.warmup_steps)
    share = SCHEDULES[run.config.lr_schedule](min(1.0, progress), run.config.min_lr)
    return run.lr * share
