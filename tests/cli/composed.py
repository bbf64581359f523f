"""What the tests of composition share: configurations as the command line gives them."""

from typing import Any

from longctx import cli
from longctx.config.request import Request
from longctx.config.train_config import TrainConfig
from longctx.planner.workload import workload_of
from longctx.training.resolve import scheduled


def compose(*arguments: str, gpu: bool = False) -> Request[TrainConfig]:
    return cli.with_model(
        cli.compose("train", cli.read("train", list(arguments)).overrides), gpu=gpu
    )


def settings(*overrides: str) -> dict[str, Any]:
    """What config.yaml says of a run with `overrides` on a CPU."""
    config = compose(*overrides).config
    return scheduled(config, workload_of(config, "cpu", config.seq_len)).settings()
