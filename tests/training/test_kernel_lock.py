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


def test_record_accepts_other_kernels_once(two_steps, other_kernels, capsys, monkeypatch):
    folder, before = two_steps, lock_of(two_steps)
    assert more(folder, 3, "kernel.lock=record") == 0
    assert "accepted others from step 3 on: fingerprint.out" in capsys.readouterr().out
    now = lock_of(folder)
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


def lock_with(device: str = "cpu") -> dict:
    """The lock of a step of 64 tokens with flash."""
    return kernel_lock.of_workload(workload_of(TrainConfig(), device, 64))


def test_a_lock_takes_no_random_number_of_the_run():
    state = torch.get_rng_state()
    first = lock_with()
    torch.manual_seed(9)
    assert lock_with() == first
    torch.set_rng_state(state)
    lock_with()
    assert torch.equal(torch.get_rng_state(), state)


def test_one_bit_changes_a_lock(monkeypatch):
    before, original = lock_with(), tiled.backward

    def backward(*args):
        gradients = original(*args)
        gradients.dk.view(torch.int32)[0, 500, 0, 3] ^= 1
        return gradients

    monkeypatch.setattr(tiled, "backward", backward)
    now = lock_with()
    assert {key for key in now if now[key] != before[key]} == {"fingerprint"}
    prints = now["fingerprint"], before["fingerprint"]
    assert {key for key in prints[0] if prints[0][key] != prints[1][key]} == {"dk"}


@pytest.mark.gpu
def test_a_lock_of_a_gpu_is_the_same_twice():
    assert lock_with(device="cuda") == lock_with(device="cuda")
