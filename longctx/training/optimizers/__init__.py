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
from longctx.config.train_config import CompleteConfig
from longctx.training.lr_schedule import learning_rate
from longctx.training.optimizers.clipping import clip_gradients

__all__ = ["build", "clip_gradients", "learning_rate", "register"]

Builder = Callable[[nn.Module, CompleteConfig], torch.optim.Optimizer]
_builders: dict[str, Builder] = {}


def register(name: str, builder: Builder, traits: Traits) -> None:
    """Make optimizer=`name` known, built by `builder`; ValueError if the name is taken."""
    if name in TRAITS:
        raise ValueError(f"optimizer={name}: is registered already; choose another name")
    TRAITS[name] = traits
    _builders[name] = builder


def build(model: nn.Module, config: CompleteConfig) -> torch.optim.Optimizer:
    """The optimizer of `config` over all weights of `model` that are trained; ValueError where it
    cannot be as asked.
    """
    chosen = config.optimizer
    chosen.validate()
    chosen.check_beside(config.memory.optimizer_state, config.lora.rank)
    builder = _builders.get(chosen.name)
    if builder is None:
        builder = importlib.import_module(f"{__name__}.{chosen.name}").build
    return builder(model, config)
