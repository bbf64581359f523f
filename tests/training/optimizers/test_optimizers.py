"""Optimizers by name: each is built, a mistake is refused, and the planner knows each."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from longctx import cli
from longctx.config.doors import OPTIMIZERS, OptimizerTraits
from longctx.config.memory_config import MemoryConfig
from longctx.config.model_config import LoraConfig
from longctx.config.objective_config import OptimizerConfig
from longctx.config.train_config import TrainConfig
from longctx.model import GPT, GPTConfig
from longctx.planner import fitting, hardware
from longctx.planner.hardware import GIB
from longctx.planner.peak_memory import OPTIMIZER, predict
from longctx.training.optimizers import build, register
from longctx.training.run import Run
from tests.training.sample_run import Trained, check_resumes_exactly, sample_run
from train import main

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


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_name_has_a_preset_and_is_built(name: str) -> None:
    config = sample_run(request(f"optimizer={name}"), "cpu")
    assert config.workload.optimizer.name == name
    sizes = GPTConfig(vocab_size=40, layers=1, channels=32, heads=2, kv_heads=1, ffn=40)
    model = GPT(sizes, "naive")
    optimizer = build(model, config)
    in_groups = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(in_groups) == sorted(id(p) for p in model.parameters())


def test_the_presets_are_the_known_names() -> None:
    assert cli.names("optimizer") == sorted(OPTIMIZERS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(optimizer=OptimizerConfig("muon", momentum=1.5)), "optimizer.momentum=1.5: "),
        (
            TrainConfig(optimizer=OptimizerConfig("muon"), lora=LoraConfig(rank=8)),
            "optimizer=muon with lora.rank=8",
        ),
        (
            TrainConfig(memory=MemoryConfig("fast", optimizer_state="bf16"), betas=(0.9, 0.999)),
            "memory.optimizer_state=bf16 with betas[1]=0.999",
        ),
    ],
)
def test_a_mistake_is_refused_by_key(config: TrainConfig, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config.validate()


def test_what_an_optimizer_cannot_do_is_refused_and_not_chosen(sgd: str) -> None:
    for overrides in (["memory=long"], ["memory.optimizer_state=host"]):
        with pytest.raises(ValueError, match=r"memory\.optimizer_state=host with optimizer=sgd"):
            request("optimizer.name=sgd", *overrides)
    config = sample_run(request("optimizer.name=sgd", "model=1b"), "cuda").workload
    policies = fitting.policies(replace(config, memory=MemoryConfig()))
    assert [chosen.memory.policy for chosen in policies] == ["fast", "balanced"]
    assert predict(policies[0]).gpu[OPTIMIZER] == 0


def test_a_muon_run_resumes_to_the_bit(trained: Trained) -> None:
    folder = trained(optimizer="muon", checkpoint_every=3)
    saved = cli.from_file(folder / "config.yaml", []).config.optimizer
    assert saved == OptimizerConfig("muon", 0.95, 5)
    assert main([f"resume={folder}", "optimizer=adamw"]) == 2
    check_resumes_exactly(folder)
