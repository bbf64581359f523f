"""What a run of several processes logs of their time: communication, the slowest, imbalance."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import train
from longctx.runs import metrics_file
from tests.processes import finished
from tests.training.sample_run import Overrides, steps
from tests.training.uneven_run import HOUR

UNEVEN = Path(__file__).parent / "uneven_run.py"
OF_SEVERAL = {"communication_ms", "imbalance", "slowest_rank", "tokens_per_second_per_device"}


def uneven_rows(overrides: list[str], cwd: Path) -> list[dict[str, Any]]:
    """The rows of a run whose process 1 takes an hour for every step, by its own clock."""
    process = finished(UNEVEN, overrides, cwd)
    assert process.returncode == 0, process.stderr
    assert "slowest rank 1" in process.stdout
    return steps(cwd / "runs" / "r")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"strategy": "fsdp"}, {"strategy": "ddp", "context": 2}],
    ids=["fsdp", "context"],
)
def test_the_process_that_others_wait_for_is_named(
    layout: dict[str, Any], overrides: Overrides, tmp_path: Path
) -> None:
    shape = {"max_steps": 5, "log_every": 2, "checkpoint_every": 3, "val_every": 3, "devices": 2}
    rows = uneven_rows(overrides(name="r", **shape, **layout), tmp_path)
    for row in rows:
        assert row.keys() >= OF_SEVERAL
        busy = [row["busy_ms/0"], row["busy_ms/1"]]
        assert min(busy) > 0  # the others' validation and start are no part of a step
        assert row["imbalance"] == pytest.approx(max(busy) / fmean(busy))
        assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 2)
    for row in rows[1:]:  # the first warms up
        assert row["slowest_rank"] == 1
        assert row["busy_ms/1"] == pytest.approx(1000 * HOUR, rel=0.1), row
        assert row["communication_ms"] > 0


def test_a_run_of_one_process_logs_none_of_it(overrides: Overrides, tmp_path: Path) -> None:
    assert train.main(overrides(name="r", max_steps=2)) == 0
    keys = set().union(*metrics_file.read(tmp_path / "runs" / "r"))
    assert not keys & OF_SEVERAL and not any(key.startswith("busy_ms") for key in keys)
