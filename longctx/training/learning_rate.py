"""The learning rate: linear warm-up, then a cosine (arXiv 1608.03983)."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from longctx.training.run import Run


def learning_rate(step: int, run: Run) -> float:
    """The rate of step `step`, counted from 0: a pure function, so resuming needs no state for it.

    It grows linearly to `lr`, then falls as a cosine to `min_lr`·`lr` at the last step.
    """
    if step < run.warmup_steps:
        return run.lr * (step + 1) / run.warmup_steps
    progress = (step - run.warmup_steps) / max(1, run.max_steps - 1 - run.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    least = run.config.min_lr
    return run.lr * (least + (1 - least) * cosine)


class LearningRate(LRScheduler):
    """Sets `learning_rate` in every parameter group, from the run's next step on."""

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        self.run = run
        for group in optimizer.param_groups:
            group["initial_lr"] = run.lr
        super().__init__(optimizer, last_epoch=run.steps_done - 1)

    def get_lr(self) -> list[float | Tensor]:
        rate = learning_rate(self.last_epoch, self.run)
        return [rate for _ in self.optimizer.param_groups]
