"""Configurations as the command line gives them, for several tests."""

from typing import Any

from longctx import cli
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.planner.workload import workload_of
from longctx.training.resolve import scheduled


def compose(*words: str, gpu: bool = False) -> Request[TrainConfig]:
    return cli.with_model(cli.compose("train", words), gpu=gpu)


def settings(*words: str) -> dict[str, Any]:
    """Return the values of config.yaml for a run with `words` on a CPU."""
    config = compose(*words).config
    return scheduled(config, workload_of(config, "cpu", config.seq_len)).settings()
