"""A step whose loss leaps is said, and dropped where that is asked for; a resumed run does as the
one that went on.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import train
from longctx.config.train_config import TrainConfig
from longctx.runs import checkpoints, run_folder
from longctx.training.callbacks import FEWEST_VALUES, WINDOW, Spikes, is_outlier
from tests.processes import finished
from tests.training.sample_run import Overrides, check_equal_weights, steps, weights

LEAPING = Path(__file__).parent / "leaping_run.py"


def spikes_of(budget: int) -> Spikes:
    return Spikes(TrainConfig(spike="skip", spike_budget=budget), print)


def test_only_a_leap_upwards_is_an_outlier() -> None:
    before = [5.0 - 0.01 * n for n in range(FEWEST_VALUES)]
    assert is_outlier(50.0, before)
    assert not is_outlier(0.1, before)
    assert not is_outlier(50.0, before[1:])
    assert not is_outlier(5.2, before), "less than a tenth of the mean"


def test_no_more_steps_than_the_budget_are_dropped() -> None:
    spikes = spikes_of(2)
    for _ in range(FEWEST_VALUES):
        assert not spikes.drops(5.0, 1.0)
    assert [spikes.drops(50.0, 1.0) for _ in range(3)] == [True, True, False]
    for _ in range(WINDOW):
        spikes.drops(5.0, 1.0)
    assert spikes.drops(5.0, 99.0), "the budget is whole again, and gradients count too"
    assert spikes.state()["skipped"] == 3


def test_a_step_that_is_not_finite_is_dropped() -> None:
    for loss, norm in ((float("nan"), 1.0), (5.0, float("inf"))):
        spikes = spikes_of(1)
        assert spikes.drops(loss, norm), "before enough values too"
        assert spikes.lost
        assert not spikes.drops(loss, norm), "the budget is used up"
        assert not spikes.lost
        assert not any(spikes.drops(5.0, 1.0) for _ in range(FEWEST_VALUES))
        assert set(spikes.losses) | set(spikes.norms) == {5.0, 1.0}


def test_a_step_without_a_target_counts_nowhere() -> None:
    spikes = spikes_of(1)
    assert spikes.drops(float("nan"), 1.0)
    for _ in range(FEWEST_VALUES):
        assert not spikes.drops(None, 0.0)
        assert not spikes.lost
        assert not spikes.drops(5.0, 1.0)
    assert set(spikes.losses) | set(spikes.norms) == {5.0, 1.0}


@pytest.fixture
def factor() -> float:
    return 10.0


@pytest.fixture
def leap(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The loss of step 12 is `factor` times as large, and its gradient with it."""
    from longctx.training import loop

    step_of_run = loop.optimizer_step

    def leaping(state: Any, batch: Any, *rest: Any) -> torch.Tensor:
        if state.steps_done == 11:
            weigh = batch.weigh
            object.__setattr__(batch, "weigh", lambda weight: weigh(factor * weight))
        return step_of_run(state, batch, *rest)

    monkeypatch.setattr(loop, "optimizer_step", leaping)


def spike_rows(folder: Path) -> list[tuple[int, int, int]]:
    return [
        (row["step"], row.get("loss_spikes", 0), row.get("steps_skipped", 0))
        for row in steps(folder)
    ]


@pytest.mark.usefixtures("leap")
def test_a_spike_is_dropped_again_on_resume(
    overrides: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape: dict[str, Any] = {"max_steps": 16, "checkpoint_every": 11, "keep_checkpoints": 9}
    runs = tmp_path / "runs"
    for kind in ("flag", "skip"):
        assert train.main(overrides(name=kind, spike=kind, **shape)) == 0
        assert "warning: loss spike at step" in capsys.readouterr().out
        skipped = int(kind == "skip")
        assert spike_rows(runs / kind)[10:13] == [(11, 0, 0), (12, 1, skipped), (13, 1, skipped)]
    assert any(
        not torch.equal(one, weights(runs / "flag")[name])
        for name, one in weights(runs / "skip").items()
    )
    before = steps(runs / "skip")
    run_folder.checkpoints(runs / "skip")[-1].rename(tmp_path / "last.ckpt")
    last = checkpoints.read(tmp_path / "last.ckpt")["state_dict"]
    assert train.main([f"resume={runs / 'skip'}"]) == 0
    torch.testing.assert_close(
        weights(runs / "skip"), {name: x[:] for name, x in last.items()}, rtol=0, atol=0
    )
    assert [row["loss"] for row in steps(runs / "skip")] == [row["loss"] for row in before]
    assert spike_rows(runs / "skip")[-1] == (16, 1, 1)


@pytest.mark.usefixtures("leap")
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("log_every", [1, 3])
def test_a_run_continues_without_a_nan_step(
    overrides: Overrides, tmp_path: Path, log_every: int
) -> None:
    """Also where it is logged or saved: its loss is in no mean, the weights are those before."""
    shape: dict[str, Any] = {"max_steps": 15, "checkpoint_every": 12, "log_every": log_every}
    assert train.main(overrides(name="r", spike="skip", **shape)) == 0
    rows = steps(tmp_path / "runs" / "r")
    assert rows[-1]["steps_skipped"] == 1
    assert (12 in [row["step"] for row in rows]) == (log_every != 1)
    assert all(x.isfinite().all() for x in weights(tmp_path / "runs" / "r").values())


def test_looking_for_spikes_changes_no_bit(overrides: Overrides, tmp_path: Path) -> None:
    for kind in ("flag", "skip"):
        assert train.main(overrides(name=kind, spike=kind, max_steps=4)) == 0
    check_equal_weights(tmp_path / "runs" / "flag", tmp_path / "runs" / "skip")


@pytest.mark.slow
def test_two_processes_drop_the_same_step(overrides: Overrides, tmp_path: Path) -> None:
    """The losses that make step 12 a spike are those of the run before it was resumed."""
    folder = tmp_path / "runs" / "r"
    assert train.main(overrides(name="r", spike="skip", max_steps=11)) == 0
    words = [f"resume={folder}", "devices=2", "max_steps=14"]
    process = finished(LEAPING, words, tmp_path, LEAP=tmp_path)
    assert process.returncode == 0, process.stderr
    for rank in range(2):
        written = (tmp_path / f"rank-{rank}").read_text().splitlines()
        assert written == ["12 1", "13 0", "14 0"]
    assert spike_rows(folder)[-1] == (14, 1, 1)
