"""The learning rate of each step: a pure function, so a resumed run needs no state for it."""

from __future__ import annotations

import math

from longctx.config.train_config import CompleteConfig


def learning_rate(step: int, config: CompleteConfig) -> float:
    """The rate of step `step`, counted from 0.

    Linear warm-up to `lr`, then a cosine that reaches `min_lr`·`lr` with the last step (arXiv
    1608.03983).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.max_steps - 1 - config.warmup_steps)
    return config.lr * (
        config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    )
