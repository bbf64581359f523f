"""Resumed runs are the uninterrupted ones bit for bit, and what cannot be resumed is refused."""

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import train
from longctx import files
from longctx.evaluation.load import load_model
from longctx.runs import metrics_file, run_folder
from longctx.training import life_cycle
from tests.training.sample_run import (
    Overrides,
    check_equal_weights,
    newest,
    steps,
    weights,
    write_checkpoint,
)


def figures(folder: Path, *more: str) -> list[list[Any]]:
    """What a resumed run must repeat: of every step these figures and those in `more`."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens_seen", "epoch", *more)
    return [[row[key] for key in keys] for row in steps(folder)]


def test_a_resumed_run_is_equal_to_the_bit(overrides: Overrides, tmp_path: Path) -> None:
    straight, resumed = tmp_path / "runs" / "straight", tmp_path / "runs" / "resumed"
    for folder in (straight, resumed):
        changes = {"max_steps": 9, "log_every": 2, "checkpoint_every": 5}
        assert train.main(overrides(name=folder.name, **changes)) == 0
    files.remove(run_folder.checkpoints(resumed)[-1])
    assert train.main([f"resume={resumed}"]) == 0
    assert figures(resumed, "padding_share") == figures(straight, "padding_share")
    check_equal_weights(straight, resumed)


def test_a_step_in_other_pieces_is_the_same_step(
    overrides: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, changes = tmp_path / "runs", {"batch_size": 2, "accumulate": 2, "checkpoint_every": 3}
    for name in ("straight", "resumed"):
        assert train.main(overrides(name=name, **changes)) == 0
    files.remove(run_folder.checkpoints(runs / "resumed")[-1])
    resume = f"resume={runs / 'resumed'}"
    capsys.readouterr()
    assert train.main([resume, "batch_size=3"]) == 2
    assert "batch_size=3" in capsys.readouterr().err
    assert train.main([resume, "batch_size=4", "memory=balanced", "memory.mlp_tile=32"]) == 0
    saved = yaml.safe_load((runs / "resumed" / "config.yaml").read_text())
    assert (saved["batch_size"], saved["accumulate"]) == (4, 1)
    memory = saved["memory"]
    assert (memory["policy"], memory["recompute"], memory["mlp_tile"]) == ("balanced", "block", 32)
    straight, resumed = (weights(runs / name) for name in ("straight", "resumed"))
    torch.testing.assert_close(straight, resumed, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stored", ["bf16", "host"])
def test_optimizer_state_resumes_as_it_is_stored(
    stored: str, overrides: Overrides, tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "runs" / "straight", tmp_path / "runs" / "resumed"
    for folder in (straight, resumed):
        changes = {"memory__optimizer_state": stored, "checkpoint_every": 3}
        assert train.main(overrides(name=folder.name, **changes)) == 0
    files.remove(run_folder.checkpoints(resumed)[-1])
    assert train.main([f"resume={resumed}"]) == 0
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(newest(resumed)[part], newest(straight)[part], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["bf16", "host"])
def test_a_resume_takes_no_more_gpu_memory(
    stored: str, overrides: Overrides, tmp_path: Path
) -> None:
    """300 MB of weights, whose moments take 600 MB in fp32, are nearly all that a step takes.

    A second run in this process takes 32 MiB more; an fp32 copy would take 300.
    """
    changes = {
        "device": "cuda",
        "compile": "false",
        "graphs": "false",
        "model__channels": 256,
        "model__vocab_size": 300_000,
        "data__val_fraction": 0,
        "memory": "fast",
        "memory__optimizer_state": stored,
        "max_steps": 2,
    }
    folder, peaks = tmp_path / "runs" / "r", []
    for argv in (overrides(name="r", **changes), [f"resume={folder}", "max_steps=4"]):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert train.main(argv) == 0
        peaks.append(torch.cuda.max_memory_allocated() / 2**20)
    assert peaks[1] <= peaks[0] + 64


def test_a_finished_run_goes_on_with_more_steps(
    overrides: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(overrides(name="r", max_steps=3)) == 0
    folder = tmp_path / "runs" / "r"
    assert train.main([f"resume={folder}"]) == 2
    assert "has done its 3 steps" in capsys.readouterr().err
    assert train.main([f"resume={folder}", "max_steps=5"]) == 0
    assert [row["step"] for row in steps(folder)] == [1, 2, 3, 4, 5]


def test_a_run_that_still_trains_is_not_resumed(
    overrides: Overrides,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may save another one until it lets go of its folder, so none is chosen before."""
    assert train.main(overrides(name="r", max_steps=2)) == 0
    folder = tmp_path / "runs" / "r"
    with run_folder.locked(folder), monkeypatch.context() as patched:
        patched.setattr(life_cycle, "resolve", lambda *_: pytest.fail("it chose one"))
        assert train.main([f"resume={folder}", "max_steps=3"]) == 2
    assert f"{folder}: another process is training this run" in capsys.readouterr().err
    assert train.main([f"resume={folder}", "max_steps=3"]) == 0


def test_a_mix_with_pass_keys_resumes_exactly(
    overrides: Overrides, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "data": "mix",
        "data__path": None,
        "data__mix__prose__path": corpus,
        "data__mix__prose__weight": 2,
        "data__mix__recall__source": "needles",
        "data__mix__recall__path": corpus,
        "data__mix__recall__documents": 12,
        "data__mix__recall__length": 400,
        "passkey": "true",
        "passkey__lengths": "[600]",
        "passkey__samples": 1,
        "passkey__depths": "[0,1]",
        "val_every": 2,
        "max_steps": 4,
    }
    straight, cut = tmp_path / "runs" / "straight", tmp_path / "runs" / "cut"
    assert train.main(overrides(name="straight", **changes)) == 0
    assert "passkey at 600 0%  needle at 600 0%" in capsys.readouterr().out
    validations = [row for row in metrics_file.read(straight) if "val_loss" in row]
    assert [row["facts_found/passkey/600"] for row in validations] == [0, 0, 0]
    every = {"checkpoint_every": 2, "keep_checkpoints": 9}
    assert train.main(overrides(name="cut", **every, **changes)) == 0
    files.remove(cut / "checkpoints" / "step-00000004.ckpt")
    assert train.main([f"resume={cut}", "passkey=false"]) == 0
    check_equal_weights(straight, cut)


def test_seq_len_schedule_resumes_exactly(
    overrides: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"seq_len_schedule": "[[16,2],[32,2]]", "max_steps": 7, "val_every": 100}
    straight, cut = tmp_path / "runs" / "straight", tmp_path / "runs" / "cut"
    assert train.main(overrides(name="straight", **changes)) == 0
    assert "first 2 steps at 16, 2 steps at 32 tokens per sequence" in capsys.readouterr().out
    rows = steps(straight)
    assert rows[0]["tokens_seen"] / (1 - rows[0]["padding_share"]) == pytest.approx(64 * 2 * 2)
    epochs = [row["epoch"] for row in rows]
    assert epochs == sorted(epochs)
    every = {"checkpoint_every": 1, "keep_checkpoints": 9}
    assert train.main(overrides(name="cut", **every, **changes)) == 0
    for stop in (5, 4, 3, 1):
        for path in run_folder.checkpoints(cut)[stop:]:
            files.remove(path)
        assert train.main([f"resume={cut}"]) == 0
        assert figures(cut) == figures(straight)
        check_equal_weights(straight, cut)
    capsys.readouterr()
    assert train.main(overrides(**{**changes, "max_steps": 4})) == 2
    assert "takes all 4 steps; leave some for seq_len" in capsys.readouterr().err


def test_resume_refuses_other_data_and_other_models(
    overrides: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "r"
    assert train.main(overrides(name="r", max_steps=2)) == 0
    assert train.main([f"resume='{folder}'", "max_steps=3", "seed=5"]) == 2
    assert "seed cannot change" in capsys.readouterr().err
    text = (folder / "config.yaml").read_text()
    for group, key, value, message in (
        ("data", "documents", 30, "no longer those that the run began with"),
        ("model", "window", 7, "model.window=7, but the run began with None"),
        (None, "weight_decay", 0.5, "weight_decay=0.5, but the run began with 0.1"),
    ):
        edited = yaml.safe_load(text)
        (edited[group] if group else edited)[key] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(edited))
        assert train.main([f"resume={folder}", "max_steps=3"]) == 2
        assert message in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_set_aside(
    overrides: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, straight = tmp_path / "runs" / "r", tmp_path / "runs" / "straight"
    changes = {"max_steps": 3, "checkpoint_every": 1, "keep_checkpoints": 9}
    assert train.main(overrides(name="straight", **changes)) == 0
    assert train.main(overrides(name="r", **changes)) == 0
    whole, flipped, cut = run_folder.checkpoints(folder)
    (file,) = flipped.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    index = cut / "checkpoint.json"
    index.write_bytes(index.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        load_model(folder)
    capsys.readouterr()
    assert train.main([f"resume={folder}"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "set aside" in line]
    for line, path in zip(lines, (cut, flipped), strict=True):
        aside = path.with_name(f"{path.name}.damaged")
        assert line.startswith(f"{path}: ") and aside.is_dir()
        assert aside.name in line and f"goes on from {whole}" in line
    assert figures(folder) == figures(straight)
    check_equal_weights(folder, straight)
    load_model(folder)


def test_no_checkpoint_goes_for_a_damaged_one(overrides: Overrides, tmp_path: Path) -> None:
    """Foreign and renamed folders, and one that lost a file, older or newer than all others."""
    folder = tmp_path / "runs" / "r"
    every = {"checkpoint_every": 1, "keep_checkpoints": 2}
    assert train.main(overrides(name="r", max_steps=2, **every)) == 0
    places = folder / "checkpoints"
    (places / "step-99999999.ckpt").mkdir()
    (places / "step-00000000.ckpt").mkdir()
    first, second = run_folder.checkpoints(folder)
    for name in ("step-00000009.ckpt", "step-2.ckpt", "step-00000003.ckpt"):
        shutil.copytree(second, places / name)
    torn = write_checkpoint(folder, 8)
    next(torn.glob("*.safetensors")).unlink()
    before = {path.name for path in places.iterdir()} - {first.name, second.name}
    assert (places / "last.ckpt").resolve() == second
    assert train.main([f"resume={folder}", "max_steps=4"]) == 0
    left = {path.name for path in places.iterdir()}
    assert {"step-00000003.ckpt", "step-00000004.ckpt"} <= left
    assert before - {"step-00000003.ckpt", torn.name} <= left
    assert (places / "last.ckpt").resolve().name == "step-00000004.ckpt"
    assert newest(folder)["steps_done"] == 4
    assert run_folder.checkpoint_of(folder).name == "step-00000004.ckpt"
    load_model(folder)
    rows = [row["step"] for row in steps(folder)]
    assert rows == [1, 2, 3, 4]


def test_no_intact_checkpoint_is_one_clear_line(
    overrides: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "r"
    assert train.main(overrides(name="r", max_steps=2, checkpoint_every=1)) == 0
    paths = run_folder.checkpoints(folder)
    for path in paths:
        (file,) = path.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
    rows = metrics_file.read(folder)
    for left in (2, 1):
        capsys.readouterr()
        assert train.main([f"resume={folder}", "max_steps=3"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert all(path.name in line for path in paths[:left])
        assert run_folder.checkpoints(folder) == paths[:left]
        assert metrics_file.read(folder) == rows
        files.remove(paths[-1])
