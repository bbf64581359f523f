"""The registry of optimizers: optimizer=NAME is built by `build` of NAME.py in this folder.

A new one is such a file, its traits in longctx.config.optimizer_config, which the planner reads
without torch, and configs/optimizer/NAME.yaml. Code from elsewhere calls `register`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from longctx.config.optimizer_config import TRAITS, Traits
from longctx.training.optimizers.clipping import clip_gradients
from longctx.training.run import Run

__all__ = ["build", "clip_gradients", "register"]

Builder = Callable[[nn.Module, Run], torch.optim.Optimizer]
_builders: dict[str, Builder] = {}


def register(name: str, builder: Builder, traits: Traits) -> None:
    """Make optimizer=`name` known, built by `builder`; ValueError if the name is taken."""
    if name in TRAITS:
        raise ValueError(f"optimizer={name}: is registered already; choose another name")
    TRAITS[name] = traits
    _builders[name] = builder


def build(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """The optimizer of `run` over all weights of `model` that are trained; ValueError where it
    cannot be as asked.
    """
    chosen = run.workload.optimizer
    chosen.validate()
    chosen.check_beside(run.workload.memory.optimizer_state, run.workload.lora.rank)
    builder = _builders.get(chosen.name)
    if builder is None:
        builder = importlib.import_module(f"{__name__}.{chosen.name}").build
    return builder(model, run)
