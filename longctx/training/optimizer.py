"""AdamW (Loshchilov & Hutter, arXiv 1711.05101), its learning rate, and clipping.

Weight decay acts on every matrix, the embedding among them (tied, it is also the output head),
never on norms and biases. The learning rate is a pure function of the step, so a resumed run needs
no state for it. Its two averages, 8 bytes a parameter, can be kept in bf16 or on the host. On a GPU
one kernel of ours updates a tensor (longctx.kernels.adamw) and clips its gradient on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import adamw as functional

from longctx.kernels import HAS_TRITON
from longctx.model.offload import pinned
from longctx.training.run import Run

SLICE = 2**26  # parameters whose averages are with the GPU at one time


def adamw(model: nn.Module, run: Run) -> torch.optim.AdamW:
    """Fused AdamW over `model` with two groups: decayed matrices, and undecayed vectors.

    `memory.optimizer` says where and how its averages are kept between steps.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": run.config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups, (beta1, beta2) = [g for g in groups if g["params"]], run.config.betas
    stored = run.workload.memory.optimizer or "fp32"
    if stored == "fp32" and not all(_by_kernel(p) for p in matrices + vectors):
        return torch.optim.AdamW(groups, lr=run.lr, betas=(beta1, beta2), fused=True)
    return AdamW(groups, run.lr, (beta1, beta2), stored)


def _by_kernel(p: Tensor) -> bool:
    return p.is_cuda and p.dtype == torch.float32 and HAS_TRITON


class AdamW(torch.optim.AdamW):
    """AdamW by our kernel on a GPU, else by torch's; its averages lie beside the weights in fp32
    ("fp32") or bf16 ("bf16"), or in pinned host memory ("host"), from where they come in slices.

    The update itself is fp32, and "host" gives the bits of averages that never left. State that was
    loaded from a checkpoint finds its place with the first step.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], stored: str
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas)
        self.stored = stored
        self.factor: Tensor | None = (
            None  # what the next step multiplies gradients by, on their device
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update(p, group)
        self.factor = None
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        step = 1 + (int(state["step"]) if state else 0)
        state["step"] = torch.tensor(float(step))  # on the host, where nobody waits for it
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = self._stored(p, state.get(name))
        in_place = _by_kernel(p) and self.stored != "host"
        size = p.numel() if in_place else SLICE
        flat, grad = p.view(-1), p.grad.reshape(-1)  # type: ignore[union-attr]
        for start in range(0, p.numel(), size):
            at = slice(start, start + size)
            kept = [state[name].view(-1)[at] for name in ("exp_avg", "exp_avg_sq")]
            m, v = (
                kept
                if in_place
                else [x.to(p.device, torch.float32, non_blocking=True, copy=True) for x in kept]
            )
            self._change(flat[at], grad[at], m, v, step, group)
            if not in_place:
                for place, new in zip(kept, (m, v), strict=True):
                    place.copy_(new, non_blocking=True)

    def _change(
        self, p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        lr, eps, weight_decay, (beta1, beta2) = (
            group[key] for key in ("lr", "eps", "weight_decay", "betas")
        )
        if _by_kernel(p):
            from longctx.kernels.adamw import adamw_

            adamw_(p, grad, m, v, self.factor, step, lr, (beta1, beta2), eps, weight_decay)
            return
        if self.factor is not None:
            grad.mul_(self.factor)
        before = torch.full((), step - 1.0, device=p.device)
        functional.adamw(
            *([p], [grad], [m], [v], [], [before]),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )

    def _stored(self, p: Tensor, average: Tensor | None) -> Tensor:
        """`average`, zeros at first, where it is kept between steps."""
        if self.stored != "host":
            dtype = torch.bfloat16 if self.stored == "bf16" else torch.float32
            return (
                torch.zeros_like(p, dtype=dtype) if average is None else average.to(p.device, dtype)
            )
        if (
            average is not None
            and average.device.type == "cpu"
            and (average.is_pinned() or not p.is_cuda)
        ):
            return average
        place = pinned(p.numel(), torch.float32).view(p.shape) if p.is_cuda else torch.empty_like(p)
        return place.zero_() if average is None else place.copy_(average)


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float | None) -> Tensor:
    """Let the next step see gradients of a global norm of at most `largest`; returns the norm
    before, on the device.
    """
    parameters = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if largest is None:
        return norm
    if isinstance(optimizer, AdamW):
        optimizer.factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm
