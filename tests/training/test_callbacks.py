"""Callbacks flag spikes, keep the best, write samples, and go on after a resume."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import eval as evaluation
import train
from longctx.runs import metrics_file, run_folder
from longctx.training import loop
from longctx.training.callbacks import FEWEST_VALUES, is_outlier
from tests.processes import train_together
from tests.training.sample_run import check_equal_weights, check_resumes_exactly, losses, steps

EVERY = {"val_every": 1, "checkpoint_every": 3, "keep_checkpoints": 1}


def test_only_a_leap_upwards_is_an_outlier():
    before = [5.0 - 0.01 * n for n in range(FEWEST_VALUES)]
    assert is_outlier(50.0, before)
    assert not is_outlier(0.1, before)
    assert not is_outlier(50.0, before[1:])
    assert not is_outlier(5.2, before), "less than a tenth of the mean"


@pytest.fixture
def spike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of step 12 is 10 times as large."""
    step_of_run = loop.optimizer_step

    def spiking(state: Any, *rest: Any) -> torch.Tensor:
        return (10 if state.scheduler.last_epoch == 11 else 1) * step_of_run(state, *rest)

    monkeypatch.setattr(loop, "optimizer_step", spiking)


@pytest.mark.usefixtures("spike")
def test_a_spike_is_flagged_again_on_resume(trained, capsys):
    folder = trained(max_steps=16, checkpoint_every=11, keep_checkpoints=9)
    assert capsys.readouterr().out.count("warning: loss spike at step 12") == 1
    counts = [row.get("loss_spikes", 0) for row in steps(folder)]
    assert counts == [0] * 11 + [1] * 5
    check_resumes_exactly(folder)
    assert [row.get("loss_spikes", 0) for row in steps(folder)] == counts


def samples(folder: Path) -> dict[int, str]:
    """Step → the sample after it."""
    return {row["step"]: row["sample"] for row in metrics_file.read(folder) if "sample" in row}


def test_watching_a_run_changes_no_bit(trained, capsys):
    # Few ids of so large a vocabulary have a token; a sample has no other
    every = {"max_steps": 3, "val_every": 2, "model__vocab_size": 4096}
    prompt = "a row, 'of' \\names: "
    shown = {"sample_prompt": prompt, "sample_every": 2}
    watched = trained("watched", keep_best=True, patience=9, **shown, **every)
    texts = samples(watched)
    assert list(texts) == [2, 3]
    assert all(text.startswith(prompt) and len(text) > len(prompt) + 32 for text in texts.values())
    assert capsys.readouterr().out.count(prompt) == 2
    plain = trained("plain", **every)
    check_equal_weights(plain, watched)
    assert losses(plain) == losses(watched)


@pytest.fixture
def val_losses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], None]:
    """Gives the validations of runs these losses, the first before the first step."""

    def give(values: Sequence[float]) -> None:
        rows = iter([{"val_loss": value} for value in values])
        monkeypatch.setattr(loop, "validate", lambda *arguments: next(rows))

    return give


def names(folder: Path) -> list[str]:
    return [path.stem for path in run_folder.checkpoints(folder)]


def test_the_best_checkpoint_stays_over_a_resume(trained, val_losses):
    val_losses([9, 5, 4, 4.5, 4.4, 4.3])
    folder = trained(max_steps=5, keep_best=True, **EVERY)
    best = folder / "checkpoints" / "best.ckpt"
    assert names(folder) == ["step-00000002", "step-00000005"]
    assert best.resolve().stem == "step-00000002"
    val_losses([4.1, 3.9, 4.2])
    assert train.main([f"resume={folder}", "max_steps=8"]) == 0
    assert names(folder) == ["step-00000007", "step-00000008"]
    assert best.resolve().stem == "step-00000007"
    assert evaluation.main([f"checkpoint={best}", "device=cpu", "documents=1"]) == 0


@pytest.mark.parametrize(("before", "changed"), [(False, "keep_best=true"), (True, "val_rows=1")])
def test_a_resume_keeps_the_best_from_then_on(trained, val_losses, before, changed):
    """The best so far may have lost its checkpoint, or be of other sequences."""
    val_losses([9, 4, 5])
    folder = trained(max_steps=2, keep_best=before, **EVERY)
    val_losses([7, 8])
    assert train.main([f"resume={folder}", "max_steps=4", changed]) == 0
    assert names(folder) == ["step-00000003", "step-00000004"]


def test_patience_ends_a_run(trained, refused, capsys):
    folder = trained(lr=1e-30, min_lr_ratio=0, max_steps=30, patience=3, **EVERY)
    printed = capsys.readouterr().out
    assert "ended after step 4: 3 validations without a lower loss" in printed
    assert printed.endswith(f"resume {folder} patience=null\n")
    assert names(folder) == ["step-00000004"]
    refused(train.main([f"resume={folder}"]), "give a larger patience=")
    assert train.main([f"resume={folder}", "patience=5", "max_steps=9"]) == 0
    assert names(folder) == ["step-00000006"]  # the three before count
    assert train.main([f"resume={folder}", "patience=6", "max_steps=7"]) == 0
    assert capsys.readouterr().out.endswith(f"resume {folder} max_steps=14 patience=null\n")
    assert train.main([f"resume={folder}", "patience=1", "val_rows=1", "max_steps=8"]) == 0


@pytest.mark.slow
def test_sharded_ranks_write_the_sample_of_one(trained, overrides, tmp_path):
    # a rate of 0: the weights stay what the seed makes them
    keys = {"lr": 0, "max_steps": 1, "accumulate": 1, "sample_every": 1, "sample_prompt": "a row"}
    train_together(2, [overrides(name="sharded", strategy="fsdp", context=2, **keys)])
    one, sharded = samples(trained("one", **keys)), samples(tmp_path / "runs" / "sharded")
    assert one == sharded
    assert len(one[1]) > len("a row")
