"""Processes of a run that do not arrive, or do not fit together: one line of the first, and code 2.

The processes are real; srun is an environment as it makes one.
"""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import train
from longctx.distributed.rendezvous import Arrival, crowded, misfit
from tests.training.sample_run import Overrides, steps

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "train.py"
ABSENT = Path(__file__).parent / "absent.py"
HERE = Arrival(0, 100, "node1", 0, "cuda", 2, 16, "2.13.0")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def of_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    return {key: str(n) for key, n in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def of_srun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": str(ranks),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(port),
    }


def begin(command: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def errors_of(process: subprocess.Popen[str], code: int = 2) -> list[str]:
    """The errors that a process ends with; no traceback among them."""
    try:
        _, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "Traceback" not in err
    return [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_a_process_that_never_arrives_is_named(overrides: Overrides, tmp_path: Path) -> None:
    environment = of_torchrun(0, 3, free_port()) | {"LONGCTX_ARRIVAL_SECONDS": "2"}
    process = begin([str(SCRIPT), *overrides(name="r")], tmp_path, environment)
    [error] = errors_of(process)
    assert "processes 1, 2 of 3 have not arrived at 127.0.0.1:" in error
    assert "asked: devices=1" in error and "starts 3 processes" in error and "cores" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_first_process_that_never_arrives_is_named(overrides: Overrides, tmp_path: Path) -> None:
    environment = of_srun(1, 2, free_port()) | {"LONGCTX_ARRIVAL_SECONDS": "2"}
    process = begin([str(SCRIPT), *overrides(name="r")], tmp_path, environment)
    [error] = errors_of(process)
    assert "process 0 of 2 has not opened 127.0.0.1:" in error


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(overrides: Overrides, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        process = begin([str(SCRIPT), *overrides(name="r")], tmp_path, of_srun(0, 2, port))
        [error] = errors_of(process)
    assert f"MASTER_PORT={port}: cannot be opened" in error


@pytest.mark.slow
def test_two_tasks_of_srun_train_together(overrides: Overrides, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"batch_size": 1, "max_steps": 3}
    assert train.main(overrides(name="one", accumulate=4, **shape)) == 0
    port = free_port()
    command = [str(SCRIPT), *overrides(name="r", accumulate=2, **shape)]
    tasks = [begin(command, tmp_path, of_srun(rank, 2, port)) for rank in range(2)]
    assert [errors_of(task, code=0) for task in tasks] == [[], []]
    expected = [row["loss"] for row in steps(tmp_path / "runs" / "one")]
    losses = [row["loss"] for row in steps(tmp_path / "runs" / "r")]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 3}, "devices=3: srun has started 2 processes"),
        ({"seq_len": "abc"}, "seq_len=abc"),
        (
            {"context": 2, "model__heads": 1, "model__kv_heads": 1, "context__method": "ulysses"},
            "context=2",
        ),
        ({"data__path": "nowhere"}, "nowhere"),
    ],
)
def test_only_the_first_process_says_what_is_wrong(
    changes: dict[str, Any], message: str, overrides: Overrides, tmp_path: Path
) -> None:
    port = free_port()
    command = [str(SCRIPT), *overrides(name="r", **changes)]
    first, second = (begin(command, tmp_path, of_srun(rank, 2, port)) for rank in range(2))
    [error] = errors_of(first)
    assert message in error
    assert errors_of(second) == []


@pytest.mark.slow
def test_a_process_that_ends_before_it_arrives_is_named(
    overrides: Overrides, tmp_path: Path
) -> None:
    process = begin([str(ABSENT), *overrides(name="r", devices=2)], tmp_path, {})
    [error] = errors_of(process)
    assert "process 1 of 2 (PID " in error and "has ended with SIGKILL" in error


CHILD = """
import os, sys, time
from longctx.distributed.launched import FIRST_VARIABLE, leave_with_first
first, lives = os.getpid(), sys.argv[1] == "lives"
if os.fork():
    if lives:
        os.wait()
    os._exit(0)
while not lives and os.getppid() == first:
    time.sleep(0.01)
leave_with_first(0, {FIRST_VARIABLE: "1"})
leave_with_first(1, {})
leave_with_first(1, {FIRST_VARIABLE: str(first)})
print("waits", flush=True)
"""


@pytest.mark.parametrize(("first", "outcome"), [("ends", ""), ("lives", "waits")])
def test_a_process_waits_no_longer_than_the_first_one_that_started_it_lives(
    first: str, outcome: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, first], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == outcome
    process.kill()
    process.wait()
    process.stdout.close()


def other(**changes: Any) -> Arrival:
    return replace(HERE, **{"rank": 1, "pid": 101, "local_rank": 1} | changes)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (other(), ""),
        (other(device="cpu", host="node2"), "process 1 on node2 computes on cpu"),
        (other(torch="2.11.0"), "has torch 2.11.0, the first 2.13.0"),
        (other(local_rank=0), "LOCAL_RANK=0: 2 processes on node1"),
        (other(local_rank=0, host="node2"), ""),
        (other(problem="devices=8: there are 2 here"), "process 1 on node1: devices=8"),
    ],
)
def test_processes_that_do_not_fit_together_are_told(one: Arrival, message: str) -> None:
    problem = misfit([HERE, one])
    assert message in problem and bool(problem) == bool(message)


def test_more_processes_than_cores_are_said() -> None:
    arrivals = [replace(HERE, rank=n, local_rank=n, device="cpu", cores=2) for n in range(3)]
    assert "3 processes share the 2 cores of node1" in crowded(arrivals)
    assert crowded(arrivals[:2]) == ""
    assert crowded([replace(one, device="cuda") for one in arrivals]) == ""
