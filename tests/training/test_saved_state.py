"""A checkpoint with other tensors than its run is refused before anything computes with them."""

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
from tests.training.sample_run import Captured, newest, replace_newest

Checkpoint = dict[str, Any]
EMBEDDING = "model.embed.weight"


def refused(folder: Path, content: Checkpoint, capsys: Captured) -> str:
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


Change = Callable[[Tensor], Any]
SHAPES: list[Change] = [
    lambda x: x[:-1].clone(),
    lambda x: torch.cat([x, x]),
    lambda x: x.flatten(),
    lambda x: torch.zeros(1),
]


@pytest.mark.parametrize("change", SHAPES)
def test_an_average_of_another_model_is_refused(
    change: Change, two_steps: Path, capsys: Captured
) -> None:
    content = newest(two_steps)
    state(content)[0]["exp_avg"] = change(state(content)[0]["exp_avg"])
    assert "exp_avg of " in refused(two_steps, content, capsys)


@pytest.mark.parametrize("change", [*SHAPES, None])
def test_a_weight_of_another_model_is_refused(
    change: Change | None, two_steps: Path, capsys: Captured
) -> None:
    content = newest(two_steps)
    weight = content["state_dict"].pop(EMBEDDING)
    if change is not None:
        content["state_dict"][EMBEDDING] = change(weight)
    assert EMBEDDING in refused(two_steps, content, capsys)
    with pytest.raises(ValueError, match=EMBEDDING):
        load_model(two_steps)


STATES: list[Callable[[Checkpoint], Any]] = [
    lambda content: state(content).pop(0),
    lambda content: state(content)[0].pop("exp_avg_sq"),
    lambda content: state(content).update({99: state(content)[0]}),
    lambda content: content["optimizer_states"][0]["param_groups"].pop(),
]


@pytest.mark.parametrize("change", STATES)
def test_a_state_of_another_optimizer_is_refused(
    change: Callable[[Checkpoint], Any], two_steps: Path, capsys: Captured
) -> None:
    content = newest(two_steps)
    change(content)
    assert run_folder.checkpoints(two_steps)[-1].name in refused(two_steps, content, capsys)


def test_optimizer_settings_come_from_the_run(
    two_steps: Path, finished_run: Path, tmp_path: Path
) -> None:
    straight = shutil.copytree(finished_run, tmp_path / "straight", symlinks=True)
    content = newest(two_steps)
    for group in content["optimizer_states"][0]["param_groups"]:
        group |= {"eps": 1e9, "betas": ("a", None), "maximize": True, "weight_decay": 1e9}
    replace_newest(content, two_steps)
    for folder in (two_steps, straight):
        assert train.main([f"resume={folder}", "max_steps=3"]) == 0
    torch.testing.assert_close(newest(two_steps)["state_dict"], newest(straight)["state_dict"])
