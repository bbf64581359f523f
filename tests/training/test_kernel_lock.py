"""The kernel lock of whole runs: what stops a resume, and what accepts new kernels."""

import json
from pathlib import Path

import pytest
import torch
import yaml

import train
from longctx.config.asked import workload_of
from longctx.config.train_config import TrainConfig
from longctx.kernels.attention import tiled
from longctx.runs import checkpoints, run_folder
from longctx.training import kernel_lock


def lock_of(folder: Path) -> dict:
    return json.loads((folder / "kernel.lock.json").read_text())


def checkpoint_lock(folder: Path) -> dict:
    return checkpoints.read(run_folder.checkpoints(folder)[-1])["longctx"]["kernel_lock"]


def more(folder: Path, steps: int, *overrides: str) -> int:
    return train.main([f"resume={folder}", f"max_steps={steps}", *overrides])


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU kernel as if a new version of torch had come: its last bits differ."""
    original = tiled.forward

    def forward(*args):
        out, lse = original(*args)
        return out * (1 + 2**-20), lse

    monkeypatch.setattr(tiled, "forward", forward)


def test_a_run_keeps_its_lock_while_kernels_stay(two_steps, capsys):
    lock = lock_of(two_steps)
    assert (lock["backend"], lock["kernel"]) == ("flash", "torch-tiled")
    assert lock["machine"] == {"torch": torch.__version__, "device": "cpu"}
    assert lock["sources"].keys() == {"tiled.py"}
    assert lock["fingerprint"].keys() == {"inputs", "out", "dq", "dk", "dv"}
    assert checkpoint_lock(two_steps) == lock
    assert more(two_steps, 3) == 0
    assert lock_of(two_steps) == checkpoint_lock(two_steps) == lock
    assert "kernels  " not in capsys.readouterr().out


def test_other_kernels_stop_a_resume_with_one_line(two_steps, other_kernels, refused):
    folder, before = two_steps, lock_of(two_steps)
    metrics = (folder / "metrics.jsonl").read_text()
    error = refused(more(folder, 3), f"fingerprint.out: {before['fingerprint']['out'][:12]} -> ")
    assert "machine" not in error
    assert "kernel.lock=record" in error
    assert lock_of(folder) == before
    assert (folder / "metrics.jsonl").read_text() == metrics


def test_record_accepts_them_once_and_keeps_what_was(two_steps, other_kernels, capsys, monkeypatch):
    folder, before = two_steps, lock_of(two_steps)
    assert more(folder, 3, "kernel.lock=record") == 0
    assert "accepted others from step 3 on: fingerprint.out" in capsys.readouterr().out
    now = lock_of(folder)
    assert now["earlier"] == [before | {"until_step": 2}]
    assert now["fingerprint"]["out"] != before["fingerprint"]["out"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["kernel"]["lock"] == "auto"
    assert more(folder, 4) == 0, "from then on they are the run's own"
    assert lock_of(folder) == now
    monkeypatch.undo()
    assert more(folder, 5) == 2
    assert more(folder, 5, "kernel.lock=off") == 0
    assert not (folder / "kernel.lock.json").exists()
    assert checkpoint_lock(folder) is None
    capsys.readouterr()
    assert more(folder, 6, "kernel.lock=auto") == 0
    assert "recorded now" in capsys.readouterr().out
    assert lock_of(folder) == checkpoint_lock(folder)


def test_lock_takes_no_random_number_of_the_run():
    work = workload_of(TrainConfig(), "cpu", 64)
    state = torch.get_rng_state()
    kernel_lock.of_workload(work)
    assert torch.equal(torch.get_rng_state(), state)
