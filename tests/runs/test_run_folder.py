"""Run folders: claimed once, locked while in use, found again, replaced whole."""

import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from longctx import cli
from longctx.cli import commands
from longctx.config.train_config import TrainConfig
from longctx.runs import metrics_file, run_folder

ROOT = Path(__file__).resolve().parents[2]


def test_runs_started_together_get_own_folders(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        arguments = [tmp_path / "runs"] * 40, [None] * 40, ["tiny-4k"] * 40
        folders = list(pool.map(run_folder.create, *arguments))
    assert sorted(path.name for path in folders) == [f"tiny-4k-{n:03d}" for n in range(1, 41)]


def test_the_newest_checkpoint_has_the_last_step(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for step in (99_999_999, 100_000_000, 5):
        (tmp_path / "checkpoints" / f"step-{step:08d}.ckpt").touch()
    names = [path.stem for path in run_folder.checkpoints(tmp_path)]
    assert names == ["step-00000005", "step-99999999", "step-100000000"]
    assert run_folder.checkpoint_of(tmp_path).stem == names[-1]


def test_lock_ends_despite_a_living_worker(tmp_path):
    """A killed run can be resumed at once, also while its data workers are still there."""
    code = f"""
import os, signal
from pathlib import Path
from longctx.runs import run_folder
with run_folder.locked(Path({str(tmp_path)!r})):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # by the child, which has left the lock by then
        signal.pause()
    signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        with pytest.raises(ValueError, match="wait for the process that trains it"):
            run_folder.check_free(tmp_path.parent, tmp_path.name)
        with pytest.raises(ValueError, match=f"{tmp_path}: another process"):
            run_folder.locked(tmp_path).__enter__()
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it lives
        assert not run_folder.is_training(tmp_path)
        with run_folder.locked(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(number, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    assert not run_folder.is_training(tmp_path)
    with pytest.raises(OSError, match="runs="), run_folder.locked(tmp_path):
        pass
    assert not any(tmp_path.iterdir())


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "tokens_seen": 10 * step, **more}


def test_metrics_past_a_step_are_dropped(tmp_path):
    rows = [row(n, loss=n / 3) for n in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, rows), '{"step": 8, "lo']))
    assert metrics_file.read(tmp_path) == rows
    metrics_file.drop_after(tmp_path, 5)
    assert metrics_file.read(tmp_path) == rows[:5]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


LINES = [b'{"st', b"[1, 2]", b'{"loss": 1}', b'{"step": null}', b'{"step": 2}', b"\xff\xfe", b"7"]


@pytest.mark.parametrize("line", [*LINES, b"1], [2", b"null, null", b"[" * 100_000])
def test_malformed_line_costs_no_other_row(line, tmp_path):
    rows = [row(1), row(3)]
    first, last = (json.dumps(row).encode() for row in rows)
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first, line, last, b""]))
    read, wrong = metrics_file.read_records(tmp_path)
    assert read == rows and wrong
    metrics_file.drop_after(tmp_path, 9)
    assert metrics_file.read_records(tmp_path) == (rows, "")


def test_a_resume_must_not_change_the_result():
    allowed = "max_steps wandb.mode workers memory accumulate memory.optimizer_state"
    run_folder.check_resumable(Path("r"), {"seed": 3}, dict.fromkeys(allowed.split()) | {"seed": 3})
    refused = "model.layers model optimizer seed data.path seq_len attention.options.a"
    for key in refused.split():
        with pytest.raises(ValueError, match=key):
            run_folder.check_resumable(Path("r"), {"seed": 3}, {key: None})


def test_a_home_folder_is_expanded(tmp_path, monkeypatch, refused):
    for line in ("train runs=~no/r", "train resume=~no/r", "train plugins=[~no/m]", "chat ~no/r"):
        refused(cli.main(line.split()), "~")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = TrainConfig(runs="~/runs", device="cpu")
    commands.check_paths(config)
    assert config.runs == f"{tmp_path}/runs"
    (tmp_path / "runs" / "r").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^resume=~/runs/r: not the folder of a run"):
        run_folder.find("~/runs/r")
