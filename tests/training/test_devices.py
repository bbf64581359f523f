"""Runs over several devices: rows and weights shared, resumed on other numbers of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eval as evaluate
import train
from longctx.cli import main
from longctx.runs import checkpoints, metrics_file, run_folder
from tests.processes import ROOT, finished
from tests.training.sample_run import Overrides, steps

SHAPE: dict[str, Any] = {"seq_len": 63, "batch_size": 1, "max_steps": 4, "val_rows": 3}
Refused = Callable[[int, str], str]


def run(tmp_path: Path, overrides: list[str]) -> None:
    """Train in a process of its own, which starts others."""
    process = finished(ROOT / "train.py", overrides, tmp_path)
    assert process.returncode == 0, process.stderr


def close(folder: Path, other: Path, rel: float = 2e-6) -> None:
    """Checks that two runs logged the same losses and validations, to a relative difference."""
    rows, others = steps(folder), steps(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, expected in zip(rows, others, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=rel)
        assert row["tokens_seen"] == expected["tokens_seen"]
    for row, expected in zip(metrics_file.read(folder), metrics_file.read(other), strict=True):
        assert row.keys() >= {key for key in expected if key.startswith("val_loss")}
        for key in expected:
            if key.startswith("val_loss"):
                assert row[key] == pytest.approx(expected[key], rel=10 * rel), key


@pytest.mark.slow
def test_two_devices_share_each_row_in_compiled_blocks(
    overrides: Overrides, tmp_path: Path
) -> None:
    """63 tokens and 3 heads, which two devices cannot share evenly, validated by position too; by
    ulysses and not compiled see test_context_check.py.
    """
    shape = SHAPE | {"model.heads": 3, "model.kv_heads": 1, "model.head_dim": 16, "accumulate": 2}
    assert train.main(overrides(name="one", **shape)) == 0
    shared = {"devices": 2, "context": 2, "context.method": "allgather", "compile": True}
    run(tmp_path, overrides(name="two", **shape | shared))
    close(tmp_path / "runs" / "two", tmp_path / "runs" / "one")


@pytest.mark.slow
def test_a_sharded_run_resumes_on_any_devices(
    overrides: Overrides,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = SHAPE | {"checkpoint_every": 2, "keep_checkpoints": 5}
    assert train.main(overrides(name="one", accumulate=4, **shape)) == 0
    run(tmp_path, overrides(name="sharded", accumulate=2, devices=2, strategy="fsdp", **shape))
    runs = tmp_path / "runs"
    close(runs / "sharded", runs / "one")
    path = run_folder.checkpoints(runs / "sharded")[0]
    assert path.is_dir()
    checkpoints.verify(path)
    for source, layout in (
        ("sharded", ["devices=1", "strategy=auto"]),
        ("sharded", ["devices=4", "context=2"]),
        ("one", ["devices=2", "strategy=fsdp"]),
    ):
        folder = runs / "-".join([source, *layout])
        shutil.copytree(runs / source, folder, symlinks=True)
        shutil.rmtree(run_folder.checkpoints(folder)[-1])
        (folder / "checkpoints" / "last.ckpt").unlink()
        words = [f"resume={folder}", *layout]
        if "devices=1" in layout:
            assert train.main(words) == 0
        else:
            run(tmp_path, words)
        close(folder, runs / "one")

    capsys.readouterr()
    sharded = str(runs / "sharded")
    assert evaluate.main([f"checkpoint={sharded}", "device=cpu", "documents=2"]) == 0
    assert main(["export", sharded, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 4, "context": 3}, "context=3: does not divide devices=4"),
        ({"context": 2}, "context=2: does not divide devices=1"),
        ({"context": 0}, "context.degree=0: a number from 1"),
        ({"context": "all"}, "context.degree=all"),
        ({"strategy": "fsdq"}, "did you mean fsdp?"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    changes: dict[str, object], message: str, overrides: Overrides, refused: Refused
) -> None:
    refused(train.main(overrides(name="r", **changes)), message)


def test_processes_that_have_begun_end_with_a_mistake(overrides: Overrides, tmp_path: Path) -> None:
    """Rank 0 finds it once it knows the model, or the run that is resumed."""
    assert train.main(overrides(name="r", batch_size=2, accumulate=2, max_steps=1)) == 0
    heads = {"devices": 3, "context": 3, "context.method": "ulysses"}
    for words, message in (
        (overrides(**heads), "context=3: context.method=ulysses divides the model's"),
        ([f"resume={tmp_path}/runs/r", "devices=3", "max_steps=2"], "devices=3: a step of the run"),
    ):
        process = finished(ROOT / "train.py", words, tmp_path)
        assert process.returncode == 2, process.stderr
        [error] = process.stderr.splitlines()
        assert message in error
