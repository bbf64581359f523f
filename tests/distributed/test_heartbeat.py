"""A process of a run that dies or stands still ends all of them, with one line that names it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from longctx.distributed.heartbeat import RUN_VARIABLE, go_on, is_alive
from longctx.python_child import typed_command
from longctx.runs import checkpoint_index, metrics_file, run_folder
from tests.processes import children, descendants, with_local_rank
from tests.training.test_processes import SCRIPT, start, wait_for_step

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OverridesIn = Callable[..., list[str]]


@contextmanager
def running(
    overrides: list[str], tmp_path: Path, launcher: list[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A run of two processes after its first step."""
    if launcher is None:
        process = start(overrides, tmp_path)
    else:
        process = subprocess.Popen(
            [*launcher, str(SCRIPT), *overrides],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    try:
        wait_for_step(tmp_path / "runs" / "r", 1, process)
        yield process
    finally:
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()


def ended(process: subprocess.Popen[str], pids: list[int]) -> str:
    """The one error of a run that ends by itself and leaves none of `pids` behind."""
    _, err = process.communicate()
    assert process.returncode not in (0, None)
    print(err)  # seen where it is not what the test expects
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    while any(map(is_alive, pids)):
        time.sleep(0.1)
    return error


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """The PIDs of the two processes of a run, in order; the data workers left out."""
    pids = descendants(process.pid)
    firsts, seconds = with_local_rank(pids, 0), with_local_rank(pids, 1)
    return [firsts[0] if firsts else process.pid, seconds[0]]


def test_a_run_goes_on_from_its_checkpoint_or_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    assert go_on() == "it has no checkpoint yet; start it anew"
    checkpoint = tmp_path / "checkpoints" / "step-00000005.ckpt"
    checkpoint.mkdir(parents=True)
    (checkpoint / checkpoint_index.INDEX).write_text('{"steps_done": 5}')
    assert go_on() == f"{typed_command()} train resume={tmp_path} goes on"


PROCESSES = ["second process", "first process", "data worker"]
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


class Loss(NamedTuple):
    """A run of two processes, one of which, or of whose data workers, a signal has reached."""

    process: subprocess.Popen[str]
    pid: int
    others: list[int]
    folder: Path

    def check(self) -> str:
        """Wait until the run has ended with the one line that it should, and return it."""
        error = ended(self.process, self.others)
        assert f"{self.pid}" in error, error
        saved = run_folder.checkpoints(self.folder)
        assert (f"resume={self.folder} goes on" if saved else "start it anew") in error
        return error


@contextmanager
def lost(
    victim: str,
    number: signal.Signals,
    overrides: list[str],
    base: Path,
    launcher: list[str] | None = None,
) -> Iterator[Loss]:
    """A run in base/runs/r whose `victim` gets the signal `number`."""
    with running(overrides, base, launcher) as process:
        first, second = own(process) if launcher is None else ranks(process)
        [worker] = children(second)
        pid = dict(zip(PROCESSES, (second, first, worker), strict=True))[victim]
        everyone = [process.pid, *descendants(process.pid)]
        os.kill(pid, number)
        others = [one for one in everyone if one != process.pid]
        yield Loss(process, pid, others, base / "runs" / "r")


def own(process: subprocess.Popen[str]) -> list[int]:
    [second] = with_local_rank(children(process.pid), 1)
    return [process.pid, second]


def long_run(overrides_in: OverridesIn, base: Path, **changes: Any) -> list[str]:
    base.mkdir(exist_ok=True)
    shape: dict[str, Any] = {"max_steps": 100_000, "devices": 2, "accumulate": 1, "workers": 1}
    return overrides_in(base / "runs", **{"name": "r"} | shape | changes)


@pytest.mark.slow
@pytest.mark.parametrize("victim", PROCESSES)
def test_a_killed_process_ends_the_run_with_one_line(
    victim: str, overrides_in: OverridesIn, tmp_path: Path
) -> None:
    with lost(victim, signal.SIGKILL, long_run(overrides_in, tmp_path), tmp_path) as loss:
        error = loss.check()
    assert ("has ended with SIGKILL" in error) == (victim == "second process")


@pytest.mark.slow
def test_a_lost_process_ends_a_run_of_torchrun(overrides_in: OverridesIn, tmp_path: Path) -> None:
    run = long_run(overrides_in, tmp_path, devices=1)
    with lost("first process", signal.SIGKILL, run, tmp_path, TORCHRUN) as loss:
        loss.check()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that NCCL connects")
@pytest.mark.parametrize("launcher", [None, TORCHRUN], ids=["own", "torchrun"])
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("victim", PROCESSES)
def test_a_lost_process_ends_a_run_on_two_gpus(
    victim: str,
    number: signal.Signals,
    launcher: list[str] | None,
    overrides_in: OverridesIn,
    tmp_path: Path,
) -> None:
    devices = 2 if launcher is None else 1
    # its heads are too small for flash; compile's processes would stand beside the data workers
    cuda = {"device": "cuda", "strategy": "fsdp", "attention": "naive"}
    cuda |= {"compile": False, "kernel__lock": "off"}
    run = long_run(overrides_in, tmp_path, devices=devices, **cuda)
    with lost(victim, number, run, tmp_path, launcher) as loss:
        loss.check()


@pytest.mark.slow
def test_stopped_processes_end_their_runs_but_not_where_all_were_stopped(
    overrides_in: OverridesIn, tmp_path: Path
) -> None:
    """Runs side by side, since each needs its time to notice: a signal stops a process of two, the
    data worker of a run of one process, and all of a run, as Ctrl-Z does, which goes on.
    """
    with ExitStack() as runs:
        enter = runs.enter_context
        everyone = enter(running(long_run(overrides_in, tmp_path / "all"), tmp_path / "all"))
        os.killpg(everyone.pid, signal.SIGSTOP)
        since = time.monotonic()
        losses = []
        for victim in PROCESSES:
            base = tmp_path / victim.replace(" ", "-")
            losses.append(enter(lost(victim, signal.SIGSTOP, long_run(overrides_in, base), base)))
        alone = enter(running(long_run(overrides_in, tmp_path, devices=1), tmp_path))
        [worker] = children(alone.pid)
        os.kill(worker, signal.SIGSTOP)

        for loss in losses:
            loss.check()
        assert f"data worker {worker} was stopped" in ended(alone, [worker])
        time.sleep(max(0.0, since + 50 - time.monotonic()))  # longer than any waits for a beat
        folder = tmp_path / "all" / "runs" / "r"
        last_step = metrics_file.read(folder)[-1]["step"]
        os.killpg(everyone.pid, signal.SIGCONT)
        time.sleep(10)
        wait_for_step(folder, last_step + 5, everyone)
