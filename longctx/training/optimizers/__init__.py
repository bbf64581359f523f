"""Optimizers: `optimizer=NAME`. Torch-free until one is built.

A new one is a file with a function that builds it and a call of `register`. One that comes with
longctx is registered here: the planner reads its description without torch, which its file needs.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longctx.config.doors import OPTIMIZERS, OptimizerConfig, OptimizerTraits
from longctx.config.fields import key, positive

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from longctx.training.run import Run

__all__ = ["OptimizerTraits", "build", "register"]

register = OPTIMIZERS.register


@dataclass
class MuonKeys(OptimizerConfig):
    """The keys of Muon."""

    momentum: float = key(0.95, "share of the average of gradients that stays", between=(0, 0.9999))
    iterations: int = positive(5, "of Newton-Schulz", limit=99)


register("adamw", OptimizerTraits(states=("fp32", "bf16", "host")))
register(
    "muon",
    OptimizerTraits(
        matrix_bytes=4,
        keys=MuonKeys,
        states=("fp32", "bf16", "host"),
        lora=False,
        orthogonalizes=True,
    ),
)


def build(model: nn.Module, run: Run) -> Optimizer:
    """Return the optimizer of `run` over all weights of `model` that are trained."""
    name = run.workload.optimizer.name
    build_optimizer = OPTIMIZERS[name].build
    if build_optimizer is None:
        build_optimizer = importlib.import_module(f"{__name__}.{name}").build
    return build_optimizer(model, run)
