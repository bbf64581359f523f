"""Optimizers by name: each has a preset, and the planner knows what each can do."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from longctx import cli
from longctx.config.doors import OPTIMIZERS, OptimizerTraits
from longctx.config.layout_config import MemoryConfig
from longctx.config.train_config import TrainConfig
from longctx.planner import fitting, hardware
from longctx.planner.hardware import GIB
from longctx.planner.peak_memory import OPTIMIZER, predict
from longctx.training.optimizers import register
from longctx.training.run import Run
from tests.training.sample_run import sample_run

H200 = hardware.chip("NVIDIA H200", 139.8 * GIB)


def plain_descent(model: torch.nn.Module, run: Run) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=run.lr)


@pytest.fixture
def sgd() -> Iterator[str]:
    """The name of an optimizer of this file's own, known for one test."""
    register("sgd", OptimizerTraits(plain_descent, matrix_bytes=0, other_bytes=0))
    yield "sgd"
    OPTIMIZERS.remove("sgd")


def request(*overrides: str) -> TrainConfig:
    config: TrainConfig = cli.compose("train", list(overrides)).config
    return config


def test_the_presets_are_the_known_names() -> None:
    assert cli.names("optimizer") == sorted(OPTIMIZERS)


def test_what_an_optimizer_cannot_do_is_refused_and_not_chosen(sgd: str) -> None:
    for overrides in (["memory=long"], ["memory.optimizer_state=host"]):
        with pytest.raises(ValueError, match=r"memory\.optimizer_state=host with optimizer=sgd"):
            request("optimizer.name=sgd", *overrides)
    config = sample_run(request("optimizer.name=sgd", "model=1b"), "cuda").workload
    policies = fitting.policies(replace(config, memory=MemoryConfig()))
    assert [chosen.memory.policy for chosen in policies] == ["fast", "balanced"]
    assert predict(policies[0]).gpu[OPTIMIZER] == 0
