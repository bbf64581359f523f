"""The waits benchmark, with real runs of a tiny model."""

import json
from pathlib import Path

import pytest

from benchmarks.words import main

TINY = ["model=tiny", "model.layers=1", "model.channels=32", "model.ffn=48", "model.heads=2"]
TINY += ["model.kv_heads=2", "seq_len=64", "batch_size=1", "accumulate=1", "device=cpu"]
TINY += ["compile=false", "workers=0"]


def test_start_save_and_end_of_real_runs_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{n % 97} of {n % 11}" for n in range(4000)))
    data = ["data=text", f"data.path={text}", "data.vocab_size=300"]
    own = ["steps=6", "starts=1", f"folder={tmp_path}/f", f"out={tmp_path}/w"]
    assert main(["waits", *TINY, *data, *own]) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "w.json").read_text())
    for start in (result["cold"], *result["warm"]):
        assert 0 < start["first_line"] < start["step_1"]
    end = result["end"]
    assert 0 < end["checkpoint"] <= end["prompt"]
    assert end["bytes"] > 4 * 32 * 48  # more than one matrix
    assert list(result["disk"]) == ["1", "4"]
    assert "last step to the prompt" in capsys.readouterr().out
    assert not (tmp_path / "f").exists()


def test_a_run_that_fails_is_told_by_its_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"folder={tmp_path}/f", f"out={tmp_path}/w", "data=text", "data.path=nowhere.txt"]
    assert main(["waits", *TINY, *own]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    assert not (tmp_path / "w.json").exists()


def test_a_folder_with_other_things_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(["waits", *TINY, f"folder={tmp_path}", f"out={tmp_path}/w"]) == 2
    assert "folder=" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "x"
