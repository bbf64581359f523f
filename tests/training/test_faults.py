"""Runs that fail: mistakes leave nothing behind, and faults end with advice."""

import json
import re
import resource
from pathlib import Path

import pytest
import torch

import train
from longctx.runs import metrics_file, run_folder
from longctx.training.optimizers import adamw
from tests.processes import without_writes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.vocab_size": "128"}, "model.vocab_size=128"),
        ({"data.path": "EMPTY"}, "data.path"),
        ({"data.path": "SHORT"}, "none of 5 documents has"),
        ({"passkey": "true", "passkey.lengths": "[1000000]"}, "passkey.lengths=[1000000]"),
        ({"context.check": "true"}, "context.check=true: compares several devices with one"),
    ],
)
def test_a_mistake_leaves_no_run_behind(overrides, changes, message, tmp_path, capsys):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "SHORT").mkdir()
    for number in range(5):
        (tmp_path / "SHORT" / f"{number}.txt").write_text("")
    given = {key: str(tmp_path / x) if x.isupper() else x for key, x in changes.items()}
    assert train.main(overrides(**given)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_nan_ends_the_run_with_advice(overrides, tmp_path, capsys):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    wild = {"max_steps": 30, "lr": 10.0, "warmup_steps": 0, "clip": None}
    at_first = "val_loss", 1e18, "(model.init_std=1e+18)"
    for name, std, advice in (("loss", 1e30, "try a smaller lr"), at_first):
        assert train.main(overrides(name=name, model__init_std=std, **wild)) == 1
        assert advice in capsys.readouterr().err
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1], parse_constant=refuse)[name] is None


def test_weights_that_are_no_numbers_are_not_saved(overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "longctx.training.learning_rate.Schedule.rate",
        lambda schedule, step: float("nan") if step else 0.1,
    )
    (tmp_path / "own.py").write_text("")
    for name, changes, message in (
        ("r", {}, "gradient norm is nan, not a finite number, at step 3; try a smaller lr"),
        ("first", {"log_every": 5, "checkpoint_every": 30}, "the loss is nan, .*, at step 3; try"),
        ("own", {"plugins": [str(tmp_path / "own.py")]}, "step 3; does .*own.py.*\\? If not: try"),
    ):
        every = {"log_every": 30, "val_every": 30, "checkpoint_every": 3} | changes
        assert train.main(overrides(name=name, max_steps=30, **every)) == 1
        assert re.search(message, capsys.readouterr().err)
        assert not run_folder.checkpoints(tmp_path / "runs" / name)


@pytest.mark.parametrize("kind", ["weight", "average"])
def test_a_state_that_is_not_finite_is_not_saved(kind, overrides, tmp_path, monkeypatch, capsys):
    class Overflows(adamw.AdamW):
        """AdamW in whose fourth step, the last before a save, a number overflows."""

        def step(self, closure: object = None) -> None:
            super().step()
            p = self.param_groups[0]["params"][0]
            if self.state[p]["step"] == 4:
                x = p if kind == "weight" else self.state[p]["exp_avg"]
                x.data[1, 2] = float("inf")

    monkeypatch.setattr(adamw, "AdamW", Overflows)
    every = {"checkpoint_every": 2, "val_every": 30, "keep_checkpoints": 1}
    assert train.main(overrides(name="r", max_steps=30, **every)) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "model.embed.weight is not finite after step 4" in line
    (kept,) = run_folder.checkpoints(tmp_path / "runs" / "r")
    assert kept.name == "step-00000002.ckpt"


def test_running_out_of_memory_says_what_to_change(overrides, monkeypatch, capsys):
    def explode(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

    monkeypatch.setattr("longctx.training.module.clip_gradients", explode)
    assert train.main(overrides(attention="naive")) == 1
    assert "attention=flash" in capsys.readouterr().err
    assert train.main(overrides(batch_size=4)) == 1
    assert "batch_size=2 accumulate=4" in capsys.readouterr().err


@pytest.mark.slow
def test_too_much_memory_is_an_error_and_no_kill(overrides, monkeypatch, capsys):
    used = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    monkeypatch.setattr("longctx.spec.hardware.host_memory", lambda: (used + (256 << 20)) // 9 * 10)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert train.main(overrides(attention="naive", seq_len=2048, max_steps=1)) == 1
    error = capsys.readouterr().err
    assert "out of memory in step 1" in error
    assert "at seq_len=2048" in error
    assert "attention=flash" in error
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert train.main(overrides(attention="flash", seq_len=2048, max_steps=1)) == 0


@pytest.mark.slow
def test_a_sweep_survives_a_job_that_fails(overrides, tmp_path, capfd):
    jobs = overrides(max_steps=2, model__vocab_size="128,null", wandb__mode="disabled")
    assert train.main(["-m", *jobs]) == 1
    printed = capfd.readouterr()
    assert "error: model.vocab_size=128" in printed.err
    *_, header, failed, finished, named = filter(str.strip, printed.out.splitlines())
    assert header.split()[0] == "job"
    assert "mistake" in failed and "well" in finished
    assert [Path(named.strip())] == list((tmp_path / "runs").iterdir())


def test_read_only_checkpoints_stop_a_resume(two_steps, refused):
    rows, checkpoints = metrics_file.read(two_steps), two_steps / "checkpoints"
    with without_writes(checkpoints):
        message = f"{checkpoints}: no file can be made there"
        refused(train.main([f"resume={two_steps}", "max_steps=3"]), message)
    assert metrics_file.read(two_steps) == rows


def test_what_a_killed_run_left_goes_at_the_next_start(two_steps):
    folder = two_steps
    for name in (".config.yaml.77.partial", "checkpoints/.last.ckpt.77.partial"):
        (folder / name).mkdir()
        (folder / name / "half").touch()
    for name in (".step-00000003.ckpt.partial", ".step-00000001.ckpt.removed"):
        (folder / "checkpoints" / name).mkdir()
    assert train.main([f"resume={folder}", "max_steps=3"]) == 0
    assert not list(folder.rglob(".*"))
