"""A checkpoint with other tensors than its run is refused before anything computes with them."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import longctx
import train
from longctx.runs import metrics_file
from tests.training.sample_run import newest, replace_newest

Checkpoint = dict[str, Any]
EMBEDDING, NEWEST = "model.embed.weight", "step-00000002.ckpt"


def state(content: Checkpoint) -> dict[int, dict[str, Any]]:
    """Of each weight the state of its optimizer."""
    return content["optimizer_states"][0]["state"]


def replace(tensors: dict[str, Tensor], name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors[name] = change(tensors[name])


def cut(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone()


# what a checkpoint has lost or has too much, and what the error names
STATES: list[tuple[Callable[[Checkpoint], Any], str]] = [
    (lambda content: content["state_dict"].pop(EMBEDDING), EMBEDDING),
    (lambda content: replace(content["state_dict"], EMBEDDING, torch.flatten), EMBEDDING),
    (lambda content: replace(content["state_dict"], EMBEDDING, cut), EMBEDDING),
    (lambda content: state(content).pop(0), NEWEST),
    (lambda content: state(content)[0].pop("exp_avg_sq"), NEWEST),
    (lambda content: replace(state(content)[0], "exp_avg", torch.flatten), "exp_avg of "),
    (lambda content: replace(state(content)[0], "exp_avg", cut), "exp_avg of "),
    (lambda content: state(content).update({99: state(content)[0]}), NEWEST),
    (lambda content: content["optimizer_states"][0]["param_groups"].pop(), NEWEST),
]


@pytest.mark.parametrize(("change", "named"), STATES)
def test_tensors_of_another_run_are_refused(change, named, two_steps, refused):
    content = newest(two_steps)
    change(content)
    replace_newest(content, two_steps)
    rows = metrics_file.read(two_steps)
    refused(train.main([f"resume={two_steps}", "max_steps=3"]), named)
    assert metrics_file.read(two_steps) == rows
    if named == EMBEDDING:
        with pytest.raises(ValueError, match=EMBEDDING):
            longctx.load(two_steps, "cpu")


def test_optimizer_settings_come_from_the_run(two_steps, finished_run, tmp_path):
    straight = shutil.copytree(finished_run, tmp_path / "straight", symlinks=True)
    content = newest(two_steps)
    for group in content["optimizer_states"][0]["param_groups"]:
        group |= {"eps": 1e9, "betas": ("a", None), "maximize": True, "weight_decay": 1e9}
    replace_newest(content, two_steps)
    for folder in (two_steps, straight):
        assert train.main([f"resume={folder}", "max_steps=3"]) == 0
    torch.testing.assert_close(newest(two_steps)["state_dict"], newest(straight)["state_dict"])
