"""A run of an earlier version is still read, evaluated and continued.

tests/fixtures/old_run was trained for 4 steps by commit 0bcc210 on tests/fixtures/old_run_corpus.
The same commit continued it to step 6, with the losses below.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train
from longctx.report.compare import compare
from longctx.report.run_view import read
from longctx.runs import checkpoints, metrics, metrics_file, run_folder

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
LOSSES = {5: 4.663863182067871, 6: 4.695882161458333}
VAL_LOSS = 4.647292258353207


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A copy of the run, its configuration with the paths of this machine."""
    folder = shutil.copytree(FIXTURES / "old_run", tmp_path / "old_run", symlinks=True)
    config = (folder / "config.yaml").read_text()
    places = {"CORPUS": FIXTURES / "old_run_corpus", "CACHE": tmp_path / "cache", "RUNS": tmp_path}
    for word, place in places.items():
        config = config.replace(word, json.dumps(str(place)))
    (folder / "config.yaml").write_text(config)
    for path in run_folder.checkpoints(folder):
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["longctx"]["config"]["data"] |= {
            "path": str(places["CORPUS"]),
            "cache": str(places["CACHE"]),
        }
        torch.save(checkpoint, path)
    return folder


def test_a_report_reads_it(old_run: Path, tmp_path: Path) -> None:
    run = read(old_run, 100)
    assert run.ended == "finished" and run.notes == []
    assert run.figures["step"] == 4 and run.figures["loss"] == pytest.approx(4.8, abs=0.2)
    assert {"loss", "val_perplexity", "tokens_per_second", "lr"} <= run.curves.keys()
    assert run.positions["x"] == [1, 2, 4, 8, 16]
    assert [score["context"] for score in run.evaluations.perplexities] == [32]
    assert run.lock["kernel"] == "torch-tiled"
    compare([old_run], tmp_path / "x.html")
    assert (tmp_path / "x.html").is_file()


def test_its_checkpoint_opens_and_evaluates(old_run: Path) -> None:
    (path,) = run_folder.checkpoints(old_run)
    assert checkpoints.read(path, checkpoints.TO_RESUME)["steps_done"] == 4
    assert (old_run / "checkpoints" / "last.ckpt").resolve() == path.resolve()
    (file,) = (old_run / "eval").glob("*.json")
    expected = json.loads(file.read_text())["total"]
    file.unlink()
    assert evaluation.main([f"checkpoint={old_run}", "device=cpu"]) == 0
    (file,) = (old_run / "eval").glob("*.json")
    result = json.loads(file.read_text())["total"]
    assert result["tokens"] == expected["tokens"]
    assert result["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)


def test_training_continues_it_with_the_losses_of_the_version_that_began_it(old_run: Path) -> None:
    before = metrics_file.read(old_run)
    assert train.main([f"resume={old_run}", "max_steps=6", "kernel.lock=record"]) == 0
    rows = metrics_file.read(old_run)
    assert rows[: len(before)] == before
    added = rows[len(before) :]
    losses = {row["step"]: row["loss"] for row in added if "loss" in row}
    assert losses == pytest.approx(LOSSES, rel=1e-4)
    assert added[-1]["val_loss"] == pytest.approx(VAL_LOSS, rel=1e-4)
    assert run_folder.checkpoints(old_run)[-1].name == "step-00000006.ckpt"
    keys = {key for row in rows for key in row}
    assert [key for key in keys if metrics.named(key) is None] == []
