"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) and its learning rate.

Weight decay acts on every matrix, the embedding among them (tied, it is also the output head), never on norms and
biases. The learning rate is a pure function of the step, so a resumed run needs no state for it. Its two averages, 8
bytes a parameter, can be kept in bf16 or on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import adamw as functional

from longctx.model.offload import pinned
from longctx.training.config import CompleteConfig

SLICE = 2**26  # parameters whose averages are with the GPU at one time


def adamw(model: nn.Module, config: CompleteConfig) -> torch.optim.AdamW:
    """Fused AdamW over `model` with two groups: decayed matrices, and undecayed vectors.

    `config.memory.optimizer` says where and how its averages are kept between steps.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups, (beta1, beta2) = [g for g in groups if g["params"]], config.betas
    if config.memory.optimizer in ("bf16", "host"):
        return StoredAdamW(groups, config.lr, (beta1, beta2), config.memory.optimizer)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), fused=True)


class StoredAdamW(torch.optim.AdamW):
    """AdamW whose averages lie in bf16 ("bf16") or in pinned host memory ("host") and come in slices for the update.

    The update itself is torch's fused one, in fp32, so "host" gives the bits of averages that never left. State that
    was loaded from a checkpoint finds its place with the first step.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], stored: str) -> None:
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        self.stored = stored

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = self._stored(p, state.get(name))
        beta1, beta2 = group["betas"]
        steps = state["step"].to(p.device)
        for start in range(0, p.numel(), SLICE):
            at = slice(start, start + SLICE)
            kept = [state[name].view(-1)[at] for name in ("exp_avg", "exp_avg_sq")]
            m, v = (x.to(p.device, torch.float32, non_blocking=True, copy=True) for x in kept)
            functional.adamw(
                [p.view(-1)[at]],
                [p.grad.reshape(-1)[at]],  # type: ignore[union-attr]
                [m],
                [v],
                [],
                [steps.clone()],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for place, new in zip(kept, (m, v), strict=True):
                place.copy_(new, non_blocking=True)
        state["step"] = steps + 1

    def _stored(self, p: Tensor, average: Tensor | None) -> Tensor:
        """`average`, zeros at first, where it is kept between steps."""
        if self.stored == "bf16":
            return torch.zeros_like(p, dtype=torch.bfloat16) if average is None else average.to(torch.bfloat16)
        if average is not None and average.device.type == "cpu" and (average.is_pinned() or not p.is_cuda):
            return average
        place = pinned(p.numel(), torch.float32).view(p.shape) if p.is_cuda else torch.empty_like(p)
        return place.zero_() if average is None else place.copy_(average)


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
