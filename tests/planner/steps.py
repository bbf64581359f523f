"""Steps of command lines, the GPU that most tests plan for, and figures to compare with."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from longctx import cli
from longctx.config.asked import workload_of
from longctx.config.layout_config import MemoryConfig
from longctx.config.train_config import TrainConfig
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload

FIGURES = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text())
# Much of a step on the host, as measured in results/memory.json
LONG = MemoryConfig("balanced", "block", 2, 32768, 0, 0, 0.6, 0, 1024, "host")
H200 = hardware.chip("NVIDIA H200", 139.8 * GIB)


@functools.cache
def composed(*overrides: str) -> TrainConfig:
    """Return the configuration of a command line."""
    config: TrainConfig = cli.compose("train", [*overrides]).config
    return config


def workload(*overrides: str, **changes: Any) -> Workload:
    """Return the step of a command line on a GPU; `changes` replace fields of its config."""
    config = replace(composed(*overrides), **changes)
    assert isinstance(config.seq_len, int)
    return workload_of(config, "cuda", config.seq_len)


def one_b(*overrides: str, **changes: Any) -> Workload:
    return workload("model=1b", *overrides, **changes)


def with_policy(step: Workload, policy: str) -> Workload:
    """Return `step` with memory=`policy`; given keys stay."""
    return replace(step, memory=step.memory.filled(policy))
