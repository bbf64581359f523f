"""Optimizers: `optimizer=NAME`. Torch-free until one is built.

A new one is a file with a function that builds it and a call of `register`. One that comes with
longctx is registered here: the planner reads its description without torch, which its file needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from longctx.config.doors import OPTIMIZERS, OptimizerTraits

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from longctx.training.run import Run

__all__ = ["OptimizerTraits", "build", "register"]

register = OPTIMIZERS.register

register("adamw", OptimizerTraits(states=("fp32", "bf16", "host")))
register(
    "muon",
    OptimizerTraits(
        matrix_bytes=4,
        keys={"momentum": 0.95, "iterations": 5},
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
    optimizer: Optimizer = build_optimizer(model, run)
    return optimizer
