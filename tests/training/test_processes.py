"""Runs in processes of their own: killed, stopped, and spread over two ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from longctx import files
from longctx.runs import metrics_file, run_folder
from tests.processes import PYTHONPATH
from tests.training.sample_run import figures, newest, steps

SCRIPT = Path(__file__).resolve().parents[2] / "train.py"
# A busy machine may take minutes to import torch
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "LONGCTX_ARRIVAL_SECONDS": "600"}
# train.py, to which signals that follow one another in a tenth of a second are several
HASTY = """
import sys, train
from longctx import system
system.TOGETHER = 0.05
system.exit_with(train.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use as many threads here as processes have: sums come out the same to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def begin(command: list[str], cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """Start Python with `command` in a process group of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    alone = {"env": os.environ | ENVIRONMENT | variables, "start_new_session": True}
    return subprocess.Popen([sys.executable, *command], cwd=cwd, **pipes, **alone)


def start(overrides: list[str], cwd: Path) -> subprocess.Popen[str]:
    return begin([str(SCRIPT), *overrides], cwd)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    while not any(row["step"] >= step for row in metrics_file.read(folder)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def catches(pid: int, number: signal.Signals) -> bool:
    """Return True once process `pid` has a handler for the signal."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)


def test_a_killed_run_resumes_bit_for_bit(trained, overrides, tmp_path):
    """Killed whenever it may be after step 9, it ends as a run of as many steps."""
    shape: dict[str, Any] = {"checkpoint_every": 4, "accumulate": 4, "workers": 1}
    shape |= {"lr_schedule": "constant", "warmup_steps": 3, "val_every": 100}
    killed = start(overrides(name="killed", max_steps=100_000, **shape), tmp_path)
    folder = tmp_path / "runs" / "killed"
    wait_for_step(folder, 9, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    end = steps(folder)[-1]["step"] + 5
    assert train.main([f"resume={folder}", f"max_steps={end}"]) == 0
    straight = trained("straight", max_steps=end, **shape)
    assert figures(folder) == figures(straight)
    assert not [path for path in folder.rglob(".*") if path.is_file()]


@pytest.mark.parametrize(
    ("number", "send", "changes"),
    [
        (signal.SIGTERM, os.killpg, {"workers": 1}),
        pytest.param(signal.SIGTERM, os.kill, {"devices": 2}, marks=pytest.mark.slow),
        pytest.param(
            signal.SIGINT, os.killpg, {"devices": 2, "workers": 1}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_stopped_run_saves_and_says_how_to_go_on(number, send, changes, overrides, tmp_path):
    process = start(overrides(name="r", max_steps=100_000, accumulate=1, **changes), tmp_path)
    folder = tmp_path / "runs" / "r"
    wait_for_step(folder, 5, process)
    send(process.pid, number)
    out, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert f"longctx resume {folder}" in out
    assert f"stopped by {signal.Signals(number).name} after step" in out
    assert newest(folder)["steps_done"] == metrics_file.read(folder)[-1]["step"]


def test_signals_in_a_validation_end_without_traceback(overrides, tmp_path):
    command = overrides(name="r", max_steps=100_000, val_every=1, val_rows=0)
    process = begin(["-c", HASTY, *command], tmp_path)
    folder = tmp_path / "runs" / "r"
    wait_for_step(folder, 2, process)
    for _ in range(3):  # each counts: the first waits for the step, the others do not
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    _, err = process.communicate()
    assert process.returncode == 143, err
    assert "Traceback" not in err


def test_a_start_that_is_stopped_leaves_no_half_run(overrides, tmp_path):
    process = start(overrides(name="r", max_steps=100_000), tmp_path)
    while not catches(process.pid, signal.SIGUSR1):
        assert process.poll() is None, process.communicate()
    time.sleep(1)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate()
    assert process.returncode == 138, err
    assert "Traceback" not in err
    folder = tmp_path / "runs" / "r"
    if "SIGUSR1 after step" in out:
        assert newest(folder)["steps_done"] >= 1
    else:
        assert err == "stopped by SIGUSR1\n"
        assert not folder.exists()


@pytest.mark.slow
def test_two_processes_print_once_and_resume_exactly(overrides, tmp_path):
    command = overrides(name="r", max_steps=4, checkpoint_every=3, devices=2, workers=1)
    both = start(command, tmp_path)
    out, err = both.communicate()
    # The first run on these documents tells that it tokenizes them
    assert both.returncode == 0 and all(line[:6] == "data: " for line in err.splitlines()), err
    assert out.count("step 4/4  loss") == 1
    folder = tmp_path / "runs" / "r"
    before = figures(folder)
    files.remove(run_folder.checkpoints(folder)[-1])
    again = start([f"resume={folder}"], tmp_path)
    _, err = again.communicate()
    assert again.returncode == 0, err
    assert figures(folder) == before


@pytest.mark.slow
def test_a_closed_pipe_saves_and_ends_the_run(overrides, tmp_path):
    process = start(overrides(name="r", max_steps=100_000, log_every=1), tmp_path)
    folder = tmp_path / "runs" / "r"
    wait_for_step(folder, 3, process)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait() == 129
    assert "SIGHUP: finishing this step" in process.stderr.read()
    assert newest(folder)["steps_done"] == metrics_file.read(folder)[-1]["step"] < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_job_saves_when_its_sweep_ends(name, overrides, tmp_path):
    process = start(["-m", *overrides(max_steps="100000,100001", workers=0)], tmp_path)
    while not (folders := [x for x in (tmp_path / "runs").glob("*") if metrics_file.read(x)]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    [folder] = folders
    wait_for_step(folder, 1, process)
    process.send_signal(signal.Signals[name])
    out, err = process.communicate()  # its output ends with the last process that writes there
    assert newest(folder)["steps_done"] == metrics_file.read(folder)[-1]["step"]
    if name != "SIGKILL":
        assert process.returncode == 128 + signal.Signals[name], err
        assert f"stopped by {name}" in out
        assert "val perplexity" in out, "the table of all jobs"
