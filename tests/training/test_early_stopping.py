"""The checkpoint with the lowest validation loss stays, and patience ends a run."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import eval as evaluation
import train
from longctx.runs import checkpoints, run_folder
from longctx.training import loop
from longctx.training.callbacks import EarlyStopping
from tests.training.sample_run import Overrides, check_equal_weights, steps, write_checkpoint

EVERY = {"val_every": 1, "checkpoint_every": 3, "keep_checkpoints": 1}


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], None]:
    """Gives the validations of runs these losses, the first before the first step."""

    def give(values: Sequence[float]) -> None:
        val_losses = iter(values)
        monkeypatch.setattr(loop, "validate", lambda *arguments: {"val_loss": next(val_losses)})

    return give


def names(folder: Path) -> list[str]:
    return [path.stem for path in run_folder.checkpoints(folder)]


def test_the_best_checkpoint_stays_over_a_resume(
    overrides: Overrides, tmp_path: Path, losses: Callable[[Sequence[float]], None]
) -> None:
    folder = tmp_path / "runs" / "r"
    losses([9, 5, 4, 4.5, 4.4, 4.3])
    assert train.main(overrides(name="r", max_steps=5, keep_best=True, **EVERY)) == 0
    best = folder / "checkpoints" / "best.ckpt"
    assert names(folder) == ["step-00000002", "step-00000005"]
    assert best.resolve().stem == "step-00000002"
    losses([4.1, 3.9, 4.2])
    assert train.main([f"resume={folder}", "max_steps=8"]) == 0
    assert names(folder) == ["step-00000007", "step-00000008"]
    assert best.resolve().stem == "step-00000007"
    assert evaluation.main([f"checkpoint={best}", "device=cpu", "documents=1"]) == 0


def test_patience_ends_a_run(
    overrides: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "r"
    still: dict[str, Any] = {"lr": 1e-30, "min_lr": 0, "max_steps": 30, "patience": 3}
    assert train.main(overrides(name="r", **still, **EVERY)) == 0
    printed = capsys.readouterr().out
    assert "ended after step 4: 3 validations without a lower loss" in printed
    assert printed.rstrip().endswith(f"longctx train resume={folder} patience=null")
    assert names(folder) == ["step-00000004"]
    assert train.main([f"resume={folder}"]) == 2
    assert "give a larger patience=" in capsys.readouterr().err
    assert train.main([f"resume={folder}", "patience=5", "max_steps=6"]) == 0
    assert names(folder) == ["step-00000006"]
    both = f"longctx train resume={folder} max_steps=12 patience=null"
    assert capsys.readouterr().out.rstrip().endswith(both)


def test_keeping_the_best_changes_no_bit(overrides: Overrides, tmp_path: Path) -> None:
    for name, changes in (("one", {}), ("other", {"keep_best": True, "patience": 9})):
        assert train.main(overrides(name=name, max_steps=4, val_every=2, **changes)) == 0
    one, other = (tmp_path / "runs" / name for name in ("one", "other"))
    check_equal_weights(one, other)
    assert [row["loss"] for row in steps(one)] == [row["loss"] for row in steps(other)]


def test_a_best_one_that_is_gone_is_not_linked(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    checkpoints.tidy(tmp_path, 3, keep=1, best_step=1)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    checkpoints.tidy(tmp_path, 3, keep=1)
    assert not (folder / "best.ckpt").is_symlink()
    checkpoints.tidy(tmp_path, 3, keep=1, best_step=2)
    assert names(tmp_path) == ["step-00000003"]
    assert not (folder / "best.ckpt").exists()


def test_its_state_comes_back() -> None:
    run = SimpleNamespace(config=SimpleNamespace(patience=2, keep_best=True))
    before, after = (EarlyStopping(run, None) for _ in range(2))  # type: ignore[arg-type]
    for step, loss in enumerate((9.0, 5.0, 6.0)):
        before.validated(step, {"val_loss": loss})
    before.validated(3, {})
    after.restore(before.state())
    assert after.state() == {"loss": 5.0, "step": 1, "since": 1} and not after.ends()
    after.validated(4, {"val_loss": math.nextafter(5.0, 6.0)})
    assert after.ends() and after.kept_step == 1
