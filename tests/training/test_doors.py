"""Doors: an objective, a schedule, an optimizer and a callback of a user's own train and resume."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import longctx
from longctx import cli
from longctx.config import presets
from longctx.config.doors import OBJECTIVES, OPTIMIZERS, SCHEDULES, OptimizerTraits
from longctx.config.layout_config import MemoryConfig
from longctx.model import GPT
from longctx.planner import fitting
from longctx.planner.peak_memory import OPTIMIZER, predict
from longctx.training import callbacks, learning_rate, objectives, optimizers
from longctx.training.batches import MicroBatch
from longctx.training.run import Run
from tests.model.test_mixers import SHORT, loaded
from tests.training.sample_run import check_resumes_exactly, newest, sample_run, steps, validations


def tripled(model: GPT, batch: MicroBatch, keys: Any) -> torch.Tensor:
    return 3 * objectives.cross_entropy(model, batch, keys)


def validated(loss: float) -> dict[str, Any]:
    return {"val_loss": torch.tensor(loss)}


def momentum(model: torch.nn.Module, run: Run) -> torch.optim.Optimizer:
    first, *others = model.parameters()  # the first at half the rate
    groups = [{"params": [first], "lr": run.lr / 2}, {"params": others}]
    return torch.optim.SGD(groups, lr=run.lr, momentum=0.9)


class Counts(callbacks.Callback):
    """Log how often it was called, over all processes of the run."""

    def __init__(self, parts: callbacks.Parts) -> None:
        self.calls = 0

    def stepped(self, step: int) -> None:
        self.calls += 1

    def logged(self, row: dict[str, Any]) -> None:
        row["calls"], row["share"] = self.calls, torch.tensor(float("nan"))

    def state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def restore(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


@pytest.fixture
def own() -> Iterator[dict[str, object]]:
    """The keys that choose this file's own parts, known for one test."""
    plain = OBJECTIVES["cross_entropy"]
    objectives.register("tripled", plain._replace(loss=tripled, metrics=validated))
    halved = learning_rate.ScheduleTraits(lambda step, schedule: torch.tensor(0.5))
    learning_rate.register("halved", halved)
    optimizers.register("momentum", OptimizerTraits(momentum, matrix_bytes=4, other_bytes=4))
    callbacks.register("counts", Counts)
    yield {"objective__name": "tripled", "lr_schedule": "halved", "optimizer__name": "momentum"}
    OBJECTIVES.remove("tripled")
    SCHEDULES.remove("halved")
    OPTIMIZERS.remove("momentum")
    callbacks.CALLBACKS.remove("counts")


def test_registered_parts_train_and_resume(own, trained):
    keys = own | {"checkpoint_every": 3, "lr": 0.01, "warmup_steps": 1, "val_every": 2}
    folder = trained(**keys)
    check_resumes_exactly(folder)

    rows = steps(folder)
    assert [(row["calls"], row["share"]) for row in rows] == [(n, None) for n in range(6)]
    assert [row["lr"] for row in rows] == [0.01, *[0.005] * 5]
    (optimizer,) = newest(folder)["optimizer_states"]
    assert optimizer["state"][0].keys() == {"momentum_buffer"}
    assert [group["lr"] for group in optimizer["param_groups"]] == [0.0025, 0.005]
    validated = validations(folder)[0]
    assert "val_perplexity" not in validated
    assert rows[0]["loss"] == pytest.approx(3 * validated["val_loss"], rel=0.1)


def test_z_loss_is_logged_beside_cross_entropy(trained):
    rows = steps(trained("with", lr=0.02, objective__z_loss=1.0))
    plain = steps(trained("without", lr=0.02, objective__z_loss=0.0))
    assert rows[0]["loss"] == plain[0]["loss"] and "z_loss" not in plain[0]
    assert rows[-1]["z_loss"] < 0.9 * rows[0]["z_loss"]


def test_a_name_is_registered_once(own):
    with pytest.raises(ValueError, match="lr_schedule=cosine is already registered"):
        learning_rate.register("cosine", SCHEDULES["cosine"])


def test_each_optimizer_has_a_preset():
    assert presets.names("optimizer") == sorted(OPTIMIZERS)


def test_what_an_optimizer_cannot_do_is_refused_and_not_chosen(own):
    with pytest.raises(ValueError, match=r"memory\.optimizer_state=host with optimizer=momen"):
        cli.compose("train", ["optimizer.name=momentum", "memory.optimizer_state=host"])
    request = cli.compose("train", ["optimizer.name=momentum", "model=1b"]).config
    config = sample_run(request, "cuda").workload
    step = replace(config, memory=MemoryConfig())
    settings = [x for way in fitting.ways(step) for share in way for x in share]
    assert {x.optimizer_state for x in settings} == {"fp32"}
    assert predict(fitting.smallest(step)).gpu[OPTIMIZER] == 4 * config.model.parameters()


def test_mistakes_with_a_mixer_are_one_line(overrides, tmp_path, refused, monkeypatch, capsys):
    right = SHORT.replace('"short"', '"wrong"')
    wrong = right.replace("x, batch):\n", "x, batch):\n        a, b = x.shape\n", 1)
    (file := tmp_path / "wrong.py").write_text(wrong)
    (trained := tmp_path / "right.py").write_text(right)
    line = wrong[: wrong.index("a, b")].count("\n") + 1
    keys = overrides(model__mixer="[wrong]", max_steps=1)
    with loaded(trained):
        assert cli.main(["train", *keys, f"plugins=[{trained}]", "name=r"]) == 0
    for words in (["train", *keys], ["eval", str(tmp_path / "runs/r")]):
        with loaded(file):
            code = cli.main([*words, f"plugins=[{file}]"])
            refused(code, f"plugins={file}: line {line}: forward: ValueError: too many values")
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    words = ["generate", str(tmp_path / "runs/r"), "prompt=Ada", "max_new_tokens=1", "device=cpu"]
    with loaded(trained):
        assert cli.main([*words, f"plugins=[{trained}]"]) == 0
    notes, prompt = map(capsys.readouterr().out.index, (" has no decoding", "Ada"))
    assert notes < prompt
    with pytest.raises(ValueError, match=rf"of a plugin: add 'plugins=\[{trained}\]', or"):
        longctx.load(tmp_path / "runs/r")
