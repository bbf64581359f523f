"""Callbacks flag or drop spikes, keep the best, write samples, and go on after a resume."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import eval as evaluation
import train
from longctx.config.train_config import TrainConfig
from longctx.runs import metrics_file, run_folder
from longctx.training import loop
from longctx.training.callbacks import FEWEST_VALUES, WINDOW, Spikes, is_outlier
from tests.processes import finished, train_together
from tests.training.sample_run import (
    FAULTY,
    Overrides,
    Trained,
    check_equal_weights,
    check_resumes_exactly,
    losses,
    steps,
    weights,
)

NAN, INF = float("nan"), float("inf")
EVERY = {"val_every": 1, "checkpoint_every": 3, "keep_checkpoints": 1}


def spikes_of(budget: int) -> Spikes:
    return Spikes(TrainConfig(spike="skip", spike_budget=budget), print)


def test_only_a_leap_upwards_is_an_outlier():
    before = [5.0 - 0.01 * n for n in range(FEWEST_VALUES)]
    assert is_outlier(50.0, before)
    assert not is_outlier(0.1, before)
    assert not is_outlier(50.0, before[1:])
    assert not is_outlier(5.2, before), "less than a tenth of the mean"


def test_no_more_steps_than_the_budget_are_dropped():
    spikes = spikes_of(2)
    for _ in range(FEWEST_VALUES):
        assert not spikes.drops(5.0, 1.0)
    assert [spikes.drops(50.0, 1.0) for _ in range(3)] == [True, True, False]
    for _ in range(WINDOW):
        spikes.drops(5.0, 1.0)
    assert spikes.drops(5.0, 99.0), "the budget is whole again, and gradients count too"
    assert spikes.state()["skipped"] == 3


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (5.0, INF)])
def test_a_step_that_is_not_finite_is_dropped(loss, norm):
    """A step without a target counts nowhere."""
    spikes = spikes_of(1)
    assert spikes.drops(loss, norm), "before enough values too"
    assert spikes.lost
    assert not spikes.drops(loss, norm), "the budget is used up"
    assert not spikes.lost
    for _ in range(FEWEST_VALUES):
        assert not spikes.drops(None, 0.0)
        assert not spikes.drops(5.0, 1.0)
    assert set(spikes.losses) | set(spikes.norms) == {5.0, 1.0}


@pytest.fixture
def spike(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The loss of step 12 is 10 times as large, or as the parameter says, and its gradient too."""
    step_of_run, factor = loop.optimizer_step, getattr(request, "param", 10.0)

    def spiking(state: Any, batch: Any, *rest: Any) -> torch.Tensor:
        if state.steps_done == 11:
            weigh = batch.weigh
            batch.weigh = lambda weight: weigh(factor * weight)
        return step_of_run(state, batch, *rest)

    monkeypatch.setattr(loop, "optimizer_step", spiking)


def spike_rows(folder: Path) -> list[tuple[int, int, int]]:
    return [
        (row["step"], row.get("loss_spikes", 0), row.get("steps_skipped", 0))
        for row in steps(folder)
    ]


@pytest.mark.usefixtures("spike")
def test_a_spike_is_dropped_again_on_resume(trained, capsys):
    every = {"max_steps": 16, "checkpoint_every": 11, "keep_checkpoints": 9}
    runs = {mode: trained(mode, spike=mode, **every) for mode in ("flag", "skip")}
    assert capsys.readouterr().out.count("warning: loss spike at step") == 2
    for mode, folder in runs.items():
        skipped = int(mode == "skip")
        assert spike_rows(folder)[10:13] == [(11, 0, 0), (12, 1, skipped), (13, 1, skipped)]
    flagged = weights(runs["flag"])
    assert any(not torch.equal(x, flagged[name]) for name, x in weights(runs["skip"]).items())
    check_resumes_exactly(runs["skip"])
    assert spike_rows(runs["skip"])[-1] == (16, 1, 1)


@pytest.mark.usefixtures("spike")
@pytest.mark.parametrize(("spike", "log_every"), [(NAN, 1), (INF, 3)], indirect=["spike"])
def test_a_run_continues_without_a_nan_step(trained, log_every):
    """If it is logged or saved too: its loss is in no mean, the weights are those before."""
    folder = trained(spike="skip", max_steps=15, checkpoint_every=12, log_every=log_every)
    rows = steps(folder)
    assert rows[-1]["steps_skipped"] == 1
    assert (12 in [row["step"] for row in rows]) == (log_every != 1)
    assert all(x.isfinite().all() for x in weights(folder).values())


@pytest.mark.slow
def test_two_processes_drop_the_same_step(trained, tmp_path):
    """The losses that make step 12 a spike are those of the run before it was resumed."""
    folder = trained(spike="skip", max_steps=11)
    words = ["spike", f"resume={folder}", "devices=2", "max_steps=14"]
    process = finished(FAULTY, words, tmp_path, FAULTY_RUN=tmp_path)
    assert process.returncode == 0, process.stderr
    for rank in range(2):
        written = (tmp_path / f"rank-{rank}").read_text().splitlines()
        assert written == ["12 1", "13 0", "14 0"]
    assert spike_rows(folder)[-1] == (14, 1, 1)


def test_watching_a_run_changes_no_bit(trained):
    plain = trained("plain", spike="flag", max_steps=4, val_every=2)
    watched = trained("watched", spike="skip", max_steps=4, val_every=2, keep_best=True, patience=9)
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
    assert printed.rstrip().endswith(f"longctx resume {folder} patience=null")
    assert names(folder) == ["step-00000004"]
    refused(train.main([f"resume={folder}"]), "give a larger patience=")
    assert train.main([f"resume={folder}", "patience=5", "max_steps=6"]) == 0
    assert names(folder) == ["step-00000006"]
    both = f"longctx resume {folder} max_steps=12 patience=null"
    assert capsys.readouterr().out.rstrip().endswith(both)


def samples(folder: Path) -> dict[int, str]:
    """Step → the sample after it."""
    return {row["step"]: row["sample"] for row in metrics_file.read(folder) if "sample" in row}


def test_samples_leave_training_as_it_is(trained, capsys):
    prompt = "a row, 'of' \\names: "
    sampled = trained("sampled", max_steps=3, sample_prompt=prompt, sample_every=2)
    texts = samples(sampled)
    assert list(texts) == [2, 3]
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text in texts.values())
    assert capsys.readouterr().out.count(prompt) == 2
    assert losses(sampled) == losses(trained("plain", max_steps=3))


@pytest.mark.slow
def test_sharded_ranks_write_the_sample_of_one(
    trained: Trained, overrides: Overrides, tmp_path: Path
) -> None:
    # a rate of 0: the weights stay what the seed makes them
    keys = {"lr": 0, "max_steps": 1, "accumulate": 1, "sample_every": 1, "sample_prompt": "a row"}
    train_together(2, [overrides(name="sharded", strategy="fsdp", context=2, **keys)])
    one, sharded = samples(trained("one", **keys)), samples(tmp_path / "runs" / "sharded")
    assert one == sharded
    assert len(one[1]) > len("a row")
