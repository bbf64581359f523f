"""A run without data or folder, for tests of what reads one."""

from longctx.config.train_config import TrainConfig
from longctx.planner.workload import workload_of
from longctx.training.resolve import scheduled
from longctx.training.run import Run


def sample_run(config: TrainConfig, device: str = "cpu") -> Run:
    """`config` with its nulls filled in for `device`."""
    assert isinstance(config.seq_len, int)
    return scheduled(config, workload_of(config, device, config.seq_len))
