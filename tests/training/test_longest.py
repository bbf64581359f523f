"""seq_len=max against a GPU that is made up: three probes at most, always a length that a probe
confirmed, near the limit.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from longctx import cli as command_line
from longctx.planner import fitting, hardware
from longctx.planner.hardware import GIB
from longctx.planner.peak_memory import predict
from longctx.planner.workload import Workload, workload_of
from longctx.training import longest
from longctx.training.dry_run import OUT_OF_MEMORY, DryRun

GPU = hardware.chip("NVIDIA H200", 139.8 * GIB)
HOST = 128 * GIB


def request(*overrides: str) -> Callable[[int], Workload]:
    config = command_line.compose("train", ["model=1b", "seq_len=max", *overrides]).config
    assert config.seq_len == "max"
    return lambda length: workload_of(replace(config, batch_size=1), "cuda", length)


class Card:
    """A GPU on which a run takes `factor` times what is predicted."""

    def __init__(self, factor: float) -> None:
        self.factor, self.probed = factor, list[int]()

    def __call__(self, work: Workload) -> DryRun:
        self.probed.append(work.seq_len)
        peak = self.factor * predict(work).peak
        if peak > GPU.usable:
            return DryRun([], failed=OUT_OF_MEMORY)
        return DryRun([1.0], memory={"memory_peak_gib": peak / GIB})


@pytest.mark.parametrize("factor", [1.0, 0.97, 1.02, 0.9, 1.05, 1.1])
def test_longest_length_is_confirmed_near_the_limit(factor: float) -> None:
    card, lines = Card(factor), list[str]()
    length = longest.find(request("memory=balanced"), card, GPU, HOST, lines.append)
    limit = fitting.longest(request("memory=balanced"), GPU.usable / factor, HOST, longest.MULTIPLE)
    assert limit is not None
    assert length in card.probed
    assert len(card.probed) <= 3
    assert len(lines) == len(card.probed)
    assert 0.9 * limit.seq_len <= length <= limit.seq_len
    if 0.97 <= factor <= 1.02:  # what the plan promises
        assert length >= 0.95 * limit.seq_len


def test_no_fitting_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="seq_len=max: no length fits"):
        longest.find(request(), Card(1.0), replace(GPU, memory=2 * GIB), HOST, print)
    with pytest.raises(ValueError, match="no length fits"):
        longest.find(request(), Card(100.0), GPU, HOST, print)


def test_another_failure_of_a_probe_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the probe of .* tokens failed: no driver"):
        longest.find(request(), lambda work: DryRun([], failed="no driver"), GPU, HOST, print)
