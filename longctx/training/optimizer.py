"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) and its learning rate.

Weight decay acts on every matrix, the embedding among them (tied, it is also the output head), never on norms and
biases. The learning rate is a pure function of the step, so a resumed run needs no state for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from longctx.training.config import CompleteConfig


def adamw(model: nn.Module, config: CompleteConfig) -> torch.optim.AdamW:
    """Fused AdamW over `model` with two groups: decayed matrices, and undecayed vectors."""
    if config.memory.optimizer not in (None, "fp32"):
        raise ValueError(f"memory.optimizer={config.memory.optimizer}: only fp32 runs yet")
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    beta1, beta2 = config.betas
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=(beta1, beta2), fused=True)


def learning_rate(step: int, config: CompleteConfig) -> float:
    """The rate of step `step`, counted from 0.

    Linear warm-up to `lr`, then a cosine that reaches `min_lr`·`lr` with the last step (arXiv 1608.03983).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.max_steps - 1 - config.warmup_steps)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def clip_gradients(model: nn.Module, largest: float | None) -> Tensor:
    """Scale all gradients to a global norm of at most `largest`; returns the norm before, on the device."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if largest is None else largest)
