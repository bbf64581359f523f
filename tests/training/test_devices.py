"""Runs over several devices: rows and weights shared, resumed on other numbers of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eval as evaluate
import train
from longctx import files
from longctx.cli import main
from longctx.runs import checkpoints, run_folder
from tests.training.sample_run import Overrides, steps
from tests.training.test_processes import start

SHAPE: dict[str, Any] = {"seq_len": 63, "batch_size": 1, "max_steps": 4, "val_rows": 3}
Refused = Callable[[int, str], str]


def run(tmp_path: Path, overrides: list[str]) -> None:
    """Train in a process of its own, which starts others."""
    process = start(overrides, tmp_path)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err


def close(folder: Path, other: Path, rel: float = 2e-6) -> None:
    """Checks that two runs logged the same losses and validations, to a relative difference."""
    rows, others = steps(folder), steps(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, expected in zip(rows, others, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=rel)
        assert row["tokens_seen"] == expected["tokens_seen"]
    for row, expected in zip(
        run_folder.read_metrics(folder), run_folder.read_metrics(other), strict=True
    ):
        assert row.keys() >= {key for key in expected if key.startswith("val_loss")}
        for key in expected:
            if key.startswith("val_loss"):
                assert row[key] == pytest.approx(expected[key], rel=10 * rel), key


@pytest.mark.parametrize(
    "method",
    [
        {},
        pytest.param(
            {
                "context.method": "allgather",
                "model.heads": 3,
                "model.kv_heads": 1,
                "model.head_dim": 16,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"context.method": "allgather", "compile": True}, marks=pytest.mark.slow),
    ],
)
def test_two_devices_share_each_row(
    method: dict[str, Any], overrides: Overrides, tmp_path: Path
) -> None:
    """63 tokens, which two devices cannot share evenly, validated by position too."""
    alone = {key: value for key, value in method.items() if key.startswith("model")}
    assert train.main(overrides(name="one", accumulate=2, **SHAPE | alone)) == 0
    shared = SHAPE | method
    run(tmp_path, overrides(name="two", accumulate=2, devices=2, context=2, **shared))
    close(tmp_path / "runs" / "two", tmp_path / "runs" / "one")


@pytest.mark.slow
def test_a_sharded_run_resumes_on_any_number_of_devices(
    overrides: Overrides,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rel = 2e-6
    shape = SHAPE | {"checkpoint_every": 2, "keep_checkpoints": 5}
    assert train.main(overrides(name="one", accumulate=4, **shape)) == 0
    run(tmp_path, overrides(name="sharded", accumulate=2, devices=2, strategy="fsdp", **shape))
    runs = tmp_path / "runs"
    close(runs / "sharded", runs / "one", rel)
    path = run_folder.checkpoints(runs / "sharded")[0]
    assert path.is_dir()
    checkpoints.verify(path)
    for number, layout in enumerate(
        (
            ["devices=1", "strategy=auto"],
            ["devices=4", "context=2", "strategy=ddp"],
        )
    ):
        folder = runs / f"resumed-{number}"
        shutil.copytree(runs / "sharded", folder, symlinks=True)
        shutil.rmtree(run_folder.checkpoints(folder)[-1])
        (folder / "checkpoints" / "last.ckpt").unlink()
        run(tmp_path, [f"resume={folder}", *layout])
        close(folder, runs / "one", rel)
    # and a run of one device goes on in slices
    folder = runs / "into-slices"
    shutil.copytree(runs / "one", folder, symlinks=True)
    files.remove(run_folder.checkpoints(folder)[-1])
    (folder / "checkpoints" / "last.ckpt").unlink()
    run(tmp_path, [f"resume={folder}", "devices=2", "strategy=fsdp"])
    close(folder, runs / "one", rel)

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
        (
            {"devices": 3, "context": 3, "context.method": "ulysses"},
            "context=3: context.method=ulysses divides the model's",
        ),
        ({"context": 0}, "context.degree=0: a number from 1"),
        ({"context": "all"}, "context.degree=all"),
        ({"strategy": "fsdq"}, "did you mean fsdp?"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    changes: dict[str, object], message: str, overrides: Overrides, refused: Refused
) -> None:
    refused(train.main(overrides(name="r", **changes)), message)


def test_a_resumed_step_keeps_its_rows(
    overrides: Overrides, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(overrides(name="r", batch_size=2, accumulate=2, max_steps=1)) == 0
    capsys.readouterr()
    code = train.main([f"resume={tmp_path}/runs/r", "devices=3", "max_steps=2"])
    refused(code, "devices=3: a step of the run has 4 rows")
