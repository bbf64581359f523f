"""Clipping of the gradients by their global norm (arXiv 1211.5063)."""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.parallel.sharding import full
from longctx.training.optimizers.adamw import AdamW


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor:
    """Let the next step see gradients of a global norm of at most `max_norm`; returns the norm
    before, on the device.

    AdamW and Muon multiply by the factor on their way over the gradients; others get gradients
    that are clipped in place.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # inside the wrapper of Fabric's
    parameters = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    norm = full(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    if max_norm is None:
        return norm
    if isinstance(optimizer, AdamW):
        optimizer.factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
