"""Checkpoints are written while the next steps run, and older ones are deleted."""

import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train
from longctx import files, system
from longctx.files import FULL_DISK
from longctx.runs import checkpoint_index, checkpoints, metrics_file, run_folder
from longctx.runs.checkpoint_write import Saving
from longctx.spec import hardware
from longctx.spec.model_config import GPTConfig
from longctx.system import StopSignal
from longctx.training import loop
from tests.training.sample_run import newest, steps
from tests.written import files_below

Arrange = Callable[[Callable[[], Any]], None]


@pytest.fixture
def in_the_write(monkeypatch: pytest.MonkeyPatch) -> Arrange:
    """Call a function in the thread that writes the first checkpoint, before it does."""

    def arrange(action: Callable[[], Any]) -> None:
        left = [action]
        monkeypatch.setattr(Saving, "_wait_for_copy", lambda *_: left and left.pop()())

    return arrange


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_copy_changes_no_byte(trained, monkeypatch, capsys):
    every = {"checkpoint_every": 2, "keep_checkpoints": 9, "max_steps": 7}
    written = {}
    for name in ("behind", "waited"):
        paths = run_folder.checkpoints(trained(name, **every))
        written[name] = {path.name: checkpoint_index.read(path)["files"] for path in paths}
        out = capsys.readouterr().out
        saved = [step for step in range(1, 9) if f"saved      after step {step}," in out]
        assert saved == [2, 4, 6, 7]
        assert out.count("training waits for each checkpoint") == (name == "waited")
        monkeypatch.setattr(hardware, "available_memory", lambda: 1000.0)
    assert len(written["behind"]) == 4
    assert written["behind"] == written["waited"]


def test_training_continues_during_a_save(trained, tmp_path, in_the_write):
    folder, seen = tmp_path / "runs" / "r", []

    def wait_for_steps() -> None:
        while not any(row["step"] == 4 for row in steps(folder)):
            time.sleep(0.01)
        seen.extend(names(folder))

    in_the_write(wait_for_steps)
    trained(checkpoint_every=2, max_steps=6)
    assert seen == [".step-00000002.ckpt.partial"]
    content = checkpoint_index.read(run_folder.checkpoints(folder)[-1])
    model = GPTConfig.of_saved(content["longctx"]["config"]["model"])
    count = sum(math.prod(x["shape"]) for x in content["tensors"].values())
    assert count == 3 * model.parameters()  # as planner/test_planner.py counts a copy
    assert names(folder) == ["last.ckpt", "step-00000004.ckpt", "step-00000006.ckpt"]


def test_a_disk_that_fills_up_ends_the_next_step(trained, capsys):
    folder = trained(max_steps=2)
    with files_below(100_000):
        command = [f"resume={folder}", "max_steps=100000", "checkpoint_every=3", "workers=1"]
        assert train.main(command) == FULL_DISK
    assert not multiprocessing.active_children()
    problem = f"{run_folder.checkpoint_path(folder, 3)}: the checkpoint could not be written"
    printed = capsys.readouterr()
    (line,) = [x for x in (printed.out + printed.err).splitlines() if problem in x]
    assert line.startswith("error: ")
    assert 3 <= steps(folder)[-1]["step"] < 100
    assert names(folder) == ["last.ckpt", "step-00000002.ckpt"]
    checkpoints.verify(run_folder.checkpoint_path(folder, 2))
    assert train.main([f"resume={folder}", "max_steps=4"]) == 0
    assert [row["step"] for row in steps(folder)] == [1, 2, 3, 4]


def test_a_signal_during_a_save_leaves_both_on_disk(overrides, tmp_path, in_the_write):
    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

    in_the_write(terminate)
    assert train.main(overrides(name="r", checkpoint_every=3, max_steps=100_000)) == 143
    folder = tmp_path / "runs" / "r"
    first, last = run_folder.checkpoints(folder)
    assert first == run_folder.checkpoint_path(folder, 3)
    for path in (first, last):
        checkpoints.verify(path)
    assert newest(folder)["steps_done"] == metrics_file.read(folder)[-1]["step"] > 3


def test_a_second_signal_ends_the_run_unsaved(overrides, tmp_path, in_the_write, monkeypatch):
    handled, has_ended, on_signal = threading.Semaphore(0), threading.Event(), StopSignal.on_signal

    def noted(*arguments: Any) -> None:
        try:
            on_signal(*arguments)
        finally:
            handled.release()

    def terminate_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            handled.acquire()
        has_ended.wait(300)

    monkeypatch.setattr(StopSignal, "on_signal", noted)
    monkeypatch.setattr(system, "TOGETHER", 0.0)
    in_the_write(terminate_twice)
    assert train.main(overrides(name="r", checkpoint_every=3, max_steps=100_000)) == 143
    assert names(tmp_path / "runs" / "r") == [".step-00000003.ckpt.partial"]
    has_ended.set()


def test_a_deleted_folder_of_a_run_stays_deleted(overrides, tmp_path, monkeypatch, capsys):
    folder, step_of_run = tmp_path / "runs" / "r", loop.optimizer_step

    def deleting(state: Any, *arguments: Any) -> Any:
        if state.scheduler.last_epoch == 1:
            shutil.rmtree(folder)
            os.kill(os.getpid(), signal.SIGTERM)  # which saves first
        return step_of_run(state, *arguments)

    monkeypatch.setattr(loop, "optimizer_step", deleting)
    assert train.main(overrides(name="r", max_steps=100_000, checkpoint_every=100_000)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {folder / 'checkpoints'}: the folder of the run is gone")
    assert not folder.exists()


def test_a_run_that_fails_completes_the_checkpoint(
    overrides, tmp_path, in_the_write, monkeypatch, capsys
):
    step_of_run = loop.optimizer_step

    def failing(state: Any, *arguments: Any) -> Any:
        if state.scheduler.last_epoch == 4:
            raise FloatingPointError("the loss is nan")
        return step_of_run(state, *arguments)

    monkeypatch.setattr(loop, "optimizer_step", failing)
    in_the_write(lambda: time.sleep(0.5))
    assert train.main(overrides(name="r", checkpoint_every=3, max_steps=9)) == 1
    printed = capsys.readouterr()
    assert "saved      after step 3," in printed.out and "the loss is nan" in printed.err
    folder = tmp_path / "runs" / "r"
    assert names(folder) == ["last.ckpt", "step-00000003.ckpt"]
    checkpoints.verify(run_folder.checkpoint_path(folder, 3))


def test_counters_are_of_the_step_that_is_saved(trained, in_the_write):
    in_the_write(lambda: time.sleep(0.3))
    every = {"checkpoint_every": 2, "keep_checkpoints": 9, "max_steps": 5, "log_every": 1}
    folder = trained(keep_best=True, val_every=1, **every)
    tokens = {row["step"]: row["tokens_seen"] for row in metrics_file.read(folder)}
    for path in run_folder.checkpoints(folder):
        content = json.loads((path / checkpoint_index.INDEX).read_text())["content"]
        step = content["steps_done"]
        assert path == run_folder.checkpoint_path(folder, step)
        assert content["meter"]["tokens_seen"] == tokens[step]
        assert content["best"]["step"] <= step
        assert len(content["spikes"]["losses"]) == step


@pytest.fixture
def at_each_deletion(monkeypatch: pytest.MonkeyPatch) -> Arrange:
    """Call a function before each replaced checkpoint is deleted."""
    remove = files.remove

    def arrange(action: Callable[[], Any]) -> None:
        def removed(path: Path, strict: bool = False) -> None:
            if path.suffix == ".removed" and strict:
                action()
            remove(path, strict)

        monkeypatch.setattr(files, "remove", removed)

    return arrange


REPLACES = {"checkpoint_every": 2, "keep_checkpoints": 1, "max_steps": 4}


def test_no_save_begins_while_a_checkpoint_is_deleted(
    trained, tmp_path, at_each_deletion, monkeypatch
):
    """A disk needs room for one more than are kept."""
    seen: list[list[str]] = []
    begin = Saving.begin

    def begin_and_look(saving: Saving, *arguments: Any, **options: Any) -> None:
        seen.append(names(tmp_path / "runs" / "r"))
        begin(saving, *arguments, **options)

    monkeypatch.setattr(Saving, "begin", begin_and_look)
    at_each_deletion(lambda: time.sleep(0.3))
    trained(checkpoint_every=1, keep_checkpoints=1, max_steps=3)
    assert seen == [[], ["last.ckpt", "step-00000001.ckpt"], ["last.ckpt", "step-00000002.ckpt"]]


def test_a_deletion_that_fails_is_one_warning(trained, at_each_deletion, monkeypatch, capsys):
    def refuse() -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    at_each_deletion(refuse)
    folder = trained(**REPLACES)
    printed = capsys.readouterr()
    (line,) = [x for x in printed.out.splitlines() if x.startswith("warning: ") and "delete" in x]
    assert "not permitted" in line and not printed.err
    (path,) = run_folder.checkpoints(folder)
    checkpoints.verify(path)
    monkeypatch.undo()
    assert train.main([f"resume={folder}", "max_steps=5"]) == 0
    assert names(folder) == ["last.ckpt", "step-00000005.ckpt"]
