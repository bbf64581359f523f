"""Samples of text while a run trains: what they continue, and where they go."""

from collections.abc import Callable
from pathlib import Path

import pytest

from longctx import cli
from longctx.runs import metrics_file
from tests.training.test_processes import start

Overrides = Callable[..., list[str]]


def sampled(folder: Path) -> dict[int, str]:
    """Step → the sample after it."""
    return {row["step"]: row["sample"] for row in metrics_file.read(folder) if "sample" in row}


def test_samples_leave_training_as_it_is(
    overrides: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "a row, 'of' \\names: "
    settings = [f"sample_prompt={prompt}", "sample_every=2"]
    assert cli.main(["train", *overrides(name="with", max_steps=3), *settings]) == 0
    texts = sampled(tmp_path / "runs" / "with")
    assert list(texts) == [2, 3]
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text in texts.values())
    assert capsys.readouterr().out.count(prompt) == 2
    assert cli.main(["train", *overrides(name="without", max_steps=3)]) == 0
    losses = [
        [row["loss"] for row in metrics_file.read(tmp_path / "runs" / name) if "loss" in row]
        for name in ("with", "without")
    ]
    assert losses[0] == losses[1]


def test_a_prompt_without_samples_is_refused(
    overrides: Overrides, refused: Callable[[int, str], str]
) -> None:
    refused(cli.main(["train", *overrides(), "sample_prompt=x"]), "sample_every")


@pytest.mark.slow
def test_sharded_ranks_write_the_sample_of_one(overrides: Overrides, tmp_path: Path) -> None:
    layouts = {"one": {"devices": 1}, "sharded": {"devices": 2, "strategy": "fsdp", "context": 2}}
    for name, layout in layouts.items():  # a rate of 0: the weights stay what the seed makes them
        run = overrides(name=name, lr=0, max_steps=1, accumulate=1, sample_every=1, **layout)
        process = start([*run, "sample_prompt=a row"], tmp_path)
        assert process.wait() == 0, process.stderr and process.stderr.read()
    one, sharded = (sampled(tmp_path / "runs" / name) for name in layouts)
    assert one == sharded
    assert len(one[1]) > len("a row")
