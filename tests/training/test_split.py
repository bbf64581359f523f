"""The parts of a step: each mark ends a part, micro-batches add up, only wanted steps are measured."""

import time
from pathlib import Path

import pytest
import torch

import train
from longctx.runs import run_folder
from longctx.training.split import StepSplit


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_are_what_lies_between_marks(device: str) -> None:
    split = StepSplit(torch.device(device))
    split.begin(wanted=True)
    for _ in range(2):
        for part, seconds in (("forward", 0.004), ("backward", 0.008)):
            time.sleep(seconds)
            split.mark(part)
    found = split.row()
    assert list(found) == ["forward_ms", "backward_ms"]
    assert 8 <= found["forward_ms"] < found["backward_ms"]
    assert split.row() == {}
    split.begin(wanted=False)
    split.mark("forward")
    assert split.row() == {}


def test_every_row_of_a_run_has_the_parts_of_its_step(words, tmp_path: Path) -> None:
    assert train.main(words(name="r", max_steps=7, log_every=3, val_every=2)) == 0
    rows = [row for row in run_folder.read_metrics(tmp_path / "runs" / "r") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6, 7]
    for row in rows:
        parts = [row[f"{part}_ms"] for part in ("forward", "backward", "optimizer")]
        assert min(parts) > 0
    assert sum(parts) < 1.2 * rows[-1]["ms_per_step"] + 1
