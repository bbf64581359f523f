"""A checkpoint with other tensors than its run is refused before anything computes with them."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from longctx.evaluation.load import load_model
from longctx.runs import metrics_file, run_folder
from tests.training.sample_run import newest, replace_newest

Checkpoint = dict[str, Any]
EMBEDDING = "model.embed.weight"


@pytest.fixture(scope="module")
def finished(
    overrides_in: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of two steps, with one checkpoint."""
    runs = tmp_path_factory.mktemp("runs")
    assert train.main(overrides_in(runs, name="r", max_steps=2)) == 0
    return runs / "r"


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(finished, tmp_path / "r", symlinks=True)


def refused(folder: Path, content: Checkpoint, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a resume from `content` is refused with."""
    replace_newest(content, folder)
    rows = metrics_file.read(folder)
    capsys.readouterr()
    assert train.main([f"resume={folder}", "max_steps=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert metrics_file.read(folder) == rows
    return line


def state(content: Checkpoint) -> dict[int, dict[str, Any]]:
    """Of each weight the state of its optimizer."""
    return content["optimizer_states"][0]["state"]


MOMENTS: dict[str, Callable[[Tensor], Any]] = {
    "shorter": lambda x: x[:-1].clone(),
    "longer": lambda x: torch.cat([x, x]),
    "flat": lambda x: x.flatten(),
    "of one number": lambda x: torch.zeros(1),
    "NaN in it": lambda x: x.clone().fill_(math.nan),
}


@pytest.mark.parametrize("kind", MOMENTS)
def test_an_average_of_another_model_is_refused(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = newest(folder)
    state(content)[0]["exp_avg"] = MOMENTS[kind](state(content)[0]["exp_avg"])
    assert "exp_avg of " in refused(folder, content, capsys)


@pytest.mark.parametrize("kind", [kind for kind in MOMENTS if kind != "NaN in it"])
def test_a_weight_of_another_model_is_refused(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = newest(folder)
    content["state_dict"][EMBEDDING] = MOMENTS[kind](content["state_dict"][EMBEDDING])
    why = f"its weights are not those of its model: {EMBEDDING} is "
    assert why in refused(folder, content, capsys)
    with pytest.raises(ValueError, match=why.partition(":")[0]):
        load_model(folder)


def state_missing(content: Checkpoint) -> None:
    del state(content)[0]


def average_missing(content: Checkpoint) -> None:
    del state(content)[0]["exp_avg_sq"]


def state_of_no_weight(content: Checkpoint) -> None:
    state(content)[99] = state(content)[0]


def other_groups(content: Checkpoint) -> None:
    content["optimizer_states"][0]["param_groups"].pop()


@pytest.mark.parametrize(
    "change",
    [state_missing, average_missing, state_of_no_weight, other_groups],
)
def test_a_state_of_another_optimizer_is_refused(
    change: Callable[[Checkpoint], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = newest(folder)
    change(content)
    assert run_folder.checkpoints(folder)[-1].name in refused(folder, content, capsys)


def test_optimizer_settings_come_from_the_run(folder: Path, finished: Path, tmp_path: Path) -> None:
    straight = shutil.copytree(finished, tmp_path / "straight", symlinks=True)
    content = newest(folder)
    for group in content["optimizer_states"][0]["param_groups"]:
        group |= {"eps": 1e9, "betas": ("a", None), "maximize": True, "weight_decay": 1e9}
    replace_newest(content, folder)
    for one in (folder, straight):
        assert train.main([f"resume={one}", "max_steps=3"]) == 0
    torch.testing.assert_close(newest(folder)["state_dict"], newest(straight)["state_dict"])
