"""A process of a run that dies or stands still ends all of them, with one line that names it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.distributed.heartbeat import is_alive, state_of
from longctx.runs import run_folder
from tests.processes import children, descendants, with_local_rank
from tests.training.sample_run import Overrides
from tests.training.test_processes import SCRIPT, start, wait_for_step

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
LIMIT = 75  # seconds: 60 until the run has ended, and what this test itself waits for


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
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, None)
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, [(pid, state_of(pid)) for pid in alive]
        time.sleep(0.1)
    return error


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """The PIDs of the two processes of a run, in order; the data workers left out."""
    pids = descendants(process.pid)
    firsts, seconds = with_local_rank(pids, 0), with_local_rank(pids, 1)
    return [firsts[0] if firsts else process.pid, seconds[0]]


VICTIMS = [
    ("second process", signal.SIGKILL),
    ("second process", signal.SIGSTOP),
    ("first process", signal.SIGKILL),
    ("first process", signal.SIGSTOP),
    ("data worker", signal.SIGKILL),
    ("data worker", signal.SIGSTOP),
]


def check_loss(
    victim: str,
    number: signal.Signals,
    overrides: list[str],
    tmp_path: Path,
    launcher: list[str] | None,
) -> float:
    """Takes one process of a run away, and returns how many seconds all of it took to end."""
    with running(overrides, tmp_path, launcher) as process:
        first, second = own(process) if launcher is None else ranks(process)
        [worker] = children(second)
        pid = {"first process": first, "second process": second, "data worker": worker}[victim]
        everyone = [process.pid, *descendants(process.pid)]
        os.kill(pid, number)
        since = time.monotonic()
        error = ended(process, [one for one in everyone if one != process.pid])
        assert f"{pid}" in error, error
        assert f"resume={tmp_path / 'runs' / 'r'} goes on" in error
        return time.monotonic() - since


def own(process: subprocess.Popen[str]) -> list[int]:
    [second] = with_local_rank(children(process.pid), 1)
    return [process.pid, second]


def long_run(overrides: Overrides, **changes: Any) -> list[str]:
    return overrides(
        **{"name": "r", "max_steps": 100_000, "devices": 2, "accumulate": 1, "workers": 1} | changes
    )


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number"), VICTIMS)
def test_a_lost_process_ends_the_run_with_one_line(
    victim: str, number: signal.Signals, overrides: Overrides, tmp_path: Path
) -> None:
    check_loss(victim, number, long_run(overrides), tmp_path, None)


@pytest.mark.slow
def test_a_lost_process_ends_a_run_of_torchrun(overrides: Overrides, tmp_path: Path) -> None:
    run = long_run(overrides, devices=1)
    check_loss("first process", signal.SIGKILL, run, tmp_path, TORCHRUN)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that NCCL connects")
@pytest.mark.parametrize("launcher", [None, TORCHRUN], ids=["own", "torchrun"])
@pytest.mark.parametrize(("victim", "number"), VICTIMS)
def test_a_lost_process_ends_a_run_on_two_gpus(
    victim: str,
    number: signal.Signals,
    launcher: list[str] | None,
    overrides: Overrides,
    tmp_path: Path,
) -> None:
    devices = 2 if launcher is None else 1
    # its heads are too small for flash; compile's processes would stand beside the data workers
    cuda = {"device": "cuda", "strategy": "fsdp", "attention": "naive"}
    cuda |= {"compile": False, "kernel__lock": "off"}
    run = long_run(overrides, devices=devices, **cuda)
    print(f"{check_loss(victim, number, run, tmp_path, launcher):.0f} s")


@pytest.mark.slow
def test_a_stopped_data_worker_ends_a_run_of_one_process(
    overrides: Overrides, tmp_path: Path
) -> None:
    process = start(long_run(overrides, devices=1), tmp_path)
    wait_for_step(tmp_path / "runs" / "r", 1, process)
    worker = children(process.pid)[0]
    os.kill(worker, signal.SIGSTOP)
    error = ended(process, [worker])
    assert f"data worker {worker} was stopped" in error


@pytest.mark.slow
def test_processes_that_were_all_stopped_for_a_while_go_on(
    overrides: Overrides, tmp_path: Path
) -> None:
    """As by Ctrl-Z and fg."""
    with running(long_run(overrides), tmp_path) as process:
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(50)
        last_step = run_folder.read_metrics(tmp_path / "runs" / "r")[-1]["step"]
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(10)
        wait_for_step(tmp_path / "runs" / "r", last_step + 5, process)
