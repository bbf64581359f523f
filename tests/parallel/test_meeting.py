"""Processes of a run that do not arrive, do not fit together, die or stop: one line, and the end.

The processes are real; srun is an environment as it makes one.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.parallel import meeting
from longctx.parallel.launch import resuming
from longctx.parallel.meeting import Arrival, misfit
from longctx.runs import checkpoint_index, metrics_file, run_folder
from tests.model.test_mixers import SHORT
from tests.processes import children, descendants, environment, free_ports, is_alive, state_of
from tests.training.sample_run import FAULTY
from tests.training.test_processes import SCRIPT, begin, wait_for_step

HERE = Arrival(0, 100, "node1", "cuda with torch 2.13.0", "")
OverridesIn = Callable[..., list[str]]
Processes = list[subprocess.Popen[str]]
# train.py, whose processes wait 2 s for the exit of one that does not answer
IMPATIENT = """
import sys, train
from longctx import system
from longctx.parallel import launch, mesh
launch.EXIT = mesh.EXIT = 2.0
system.exit_with(train.main(sys.argv[1:]))
"""
# torchrun's variables, given by hand
OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
OF_TORCHRUN |= {"MASTER_ADDR": "127.0.0.1"}
VICTIMS = ["rank 1", "rank 0", "data worker"]


def torchrun(nodes: int) -> list[list[str]]:
    """Return the command of torchrun on each of `nodes`, two processes in all."""
    port = free_ports(1)[0]
    command = ["-m", "torch.distributed.run", "--nnodes", str(nodes)]
    command += ["--nproc-per-node", str(2 // nodes), "--master-port", str(port)]
    return [[*command, "--node-rank", str(node)] for node in range(nodes)]


def of_srun(rank: int, port: int) -> dict[str, str]:
    """Return the environment of one of two tasks of srun, on one node."""
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_PORT": str(port),
    }


def errors_of(process: subprocess.Popen[str], code: int | None = 2) -> list[str]:
    """Return the errors that a process ends with; None stands for every exit code but 0."""
    try:
        _, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == code if code is not None else process.returncode, err
    return [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (OF_TORCHRUN, "processes 1, 2 of 3 have not arrived at 127.0.0.1:"),
        (of_srun(1, free_ports(1)[0]), "process 0 of 2 cannot listen there, or is gone"),
    ],
    ids=["others", "rank 0"],
)
def test_a_process_that_never_arrives_is_named(variables, message, overrides, tmp_path):
    variables = {"MASTER_PORT": str(free_ports(1)[0]), "LONGCTX_ARRIVAL_SECONDS": "2"} | variables
    [error] = errors_of(begin([str(SCRIPT), *overrides(name="r")], tmp_path, **variables))
    assert message in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(overrides, tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        process = begin([str(SCRIPT), *overrides(name="r")], tmp_path, **of_srun(0, port))
        [error] = errors_of(process)
    assert f"MASTER_PORT={port}: process 0 of 2 cannot listen" in error


@pytest.mark.slow
def test_a_process_killed_before_it_arrives_is_named(overrides, tmp_path):
    process = begin([str(FAULTY), "absent", *overrides(name="r", devices=2)], tmp_path)
    [error] = errors_of(process, code=1)
    assert "process 1 (PID " in error
    assert "has ended with SIGKILL" in error


@pytest.mark.slow
def test_a_mistake_in_a_mixer_of_rank_1_is_printed_with_its_place(overrides, tmp_path):
    here = 'x, batch):\n        assert __import__("os").environ["RANK"] == "0", "of rank 1"\n'
    (file := tmp_path / "mine.py").write_text(SHORT.replace("x, batch):\n", here, 1))
    keys = overrides(name="r", devices=2, plugins=f"[{file}]", model__mixer="[short]")
    [error] = errors_of(begin([str(SCRIPT), *keys], tmp_path))
    assert "process 1 (PID " in error
    assert f"plugins={file}: line " in error
    assert error.endswith(": forward: AssertionError: of rank 1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 3}, "devices=3: srun has started 2 processes"),
        ({"data__path": "nowhere"}, "nowhere"),
    ],
    ids=["devices", "data"],
)
def test_only_rank_0_prints_what_is_wrong(changes, message, overrides, tmp_path):
    port = free_ports(1)[0]
    command = [str(SCRIPT), *overrides(name="r", **changes)]
    first, second = (begin(command, tmp_path, **of_srun(rank, port)) for rank in range(2))
    [error] = errors_of(first)
    assert message in error
    assert errors_of(second) == []


def other(**changes: Any) -> Arrival:
    return HERE._replace(**{"rank": 1, "pid": 101} | changes)


def test_processes_that_do_not_fit_are_refused():
    assert misfit([HERE, other()]) == ""
    on_cpu = misfit([HERE, other(computes_on="cpu with torch 2.13.0", host="node2")])
    assert "process 1 (PID 101 on node2)" in on_cpu and "cpu" in on_cpu and "rank 0" in on_cpu
    assert "PID 101 on node1): devices=8" in misfit([HERE, other(problem="devices=8: too many")])


def test_a_lost_run_continues_from_its_checkpoint(tmp_path):
    assert "start it anew" in resuming(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-00000005.ckpt"
    checkpoint.mkdir(parents=True)
    (checkpoint / checkpoint_index.INDEX).write_text('{"steps_done": 5}')
    assert f"resume {tmp_path} continues it" in resuming(tmp_path)


@contextmanager
def running(
    overrides_in: OverridesIn,
    base: Path,
    nodes: int = 0,
    program: Sequence[str] = (str(SCRIPT),),
    **changes: Any,
) -> Iterator[Processes]:
    """Yield a run of two processes after its first step: torchrun's on `nodes`, or our own."""
    shape: dict[str, Any] = {"name": "r", "max_steps": 100_000, "accumulate": 1, "workers": 1}
    shape |= {} if nodes else {"devices": 2}
    command = [*program, *overrides_in(base / "runs", **shape | changes)]
    seconds = {"LONGCTX_COLLECTIVE_SECONDS": "10"}
    launchers = torchrun(nodes) if nodes else [[]]
    processes = [begin([*launcher, *command], base, **seconds) for launcher in launchers]
    try:
        wait_for_step(base / "runs" / "r", 1, processes[0])
        yield processes
    finally:
        for process in processes:
            for pid in filter(is_alive, [*descendants(process.pid), process.pid]):
                os.kill(pid, signal.SIGKILL)


def pid_of(processes: Processes, victim: str) -> int:
    """Return the PID of a rank, or of rank 1's data worker."""
    pids = [pid for process in processes for pid in descendants(process.pid)]
    ranks = {rank: [pid for pid in pids if f"RANK={rank}" in environment(pid)] for rank in (0, 1)}
    if victim == "rank 0":
        return ranks[0][0]
    return ranks[1][0] if victim == "rank 1" else children(ranks[1][0])[0]


def check_ends(processes: Processes, pid: int, folder: Path) -> None:
    """Check that a run whose process `pid` has got a signal ends with one line, and leaves none."""
    everyone = [pid for process in processes for pid in descendants(process.pid)]
    errors = [error for process in processes for error in errors_of(process, code=None)]
    assert len(errors) == 1, errors
    assert str(pid) in errors[0], errors
    saved = run_folder.checkpoints(folder)
    assert (f"resume {folder} continues it" if saved else "start it anew") in errors[0]
    while any(map(is_alive, everyone)):
        time.sleep(0.1)


# On two GPUs that NCCL connects. Heads of this size are too small for flash; compile's processes
# would stand beside the data workers.
CUDA = {"device": "cuda", "strategy": "fsdp", "attention": "naive"}
CUDA |= {"compile": False, "kernel__lock": "off"}
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that NCCL connects"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "victim", "changes"),
    [
        *((0, victim, {}) for victim in VICTIMS),
        *((1, "rank 1", {}), (2, "rank 0", {})),
        *(pytest.param(n, victim, CUDA, marks=TWO_GPUS) for n in (0, 1) for victim in VICTIMS),
    ],
)
def test_a_killed_process_ends_its_run_in_one_line(nodes, victim, changes, overrides_in, tmp_path):
    with running(overrides_in, tmp_path, nodes, **changes) as processes:
        pid = pid_of(processes, victim)
        os.kill(pid, signal.SIGKILL)
        check_ends(processes, pid, tmp_path / "runs" / "r")


def listeners(pids: Sequence[int]) -> set[str]:
    """Return the addresses at which the processes listen, as /proc/net has them."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").glob("*")]
    sockets = {os.readlink(link) for link in links if link.is_symlink()}
    lines = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [line.split() for table in lines for line in table]
    listening = "0A"
    return {
        row[1].partition(":")[0]
        for row in rows
        if row[3] == listening and f"socket:[{row[9]}]" in sockets
    }


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "launcher"), [(0, "supervisor"), (1, "agent")])
def test_a_killed_launcher_leaves_no_rank(nodes, launcher, overrides_in, tmp_path):
    """And ranks of a supervisor listen on loopback alone."""
    with running(overrides_in, tmp_path, nodes) as [process]:
        everyone = descendants(process.pid)
        found = listeners([process.pid, *everyone])
        assert found and (nodes or found <= LOOPBACK)
        process.kill()
        while any(map(is_alive, everyone)):
            time.sleep(0.01)


STRANGERS = [b"", b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n"]


def stranger(
    port: int, words: bytes, process: subprocess.Popen[str] | None = None
) -> socket.socket:
    """Connect to a port of this machine and say `words`, once `process` listens there."""
    while process is None or process.poll() is None:
        try:
            client = socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            client.sendall(words)
            return client
    raise AssertionError(process.communicate())


def test_strangers_do_not_hold_up_a_greeting(monkeypatch):
    monkeypatch.setattr(meeting, "READING", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        clients = [stranger(port, words) for words in [*STRANGERS, meeting.GREETING % 1]]
        peers = meeting.greeted(server, [other(), other(rank=2)], 1.0)
        assert [peer.rank for peer in peers.values()] == [1]
        for client in clients:
            client.close()


@pytest.mark.slow
def test_strangers_do_not_hold_up_the_start(overrides, tmp_path):
    port = free_ports(1)[0]
    command = [str(SCRIPT), *overrides(name="r", max_steps=2)]
    first = begin(command, tmp_path, **of_srun(0, port))
    clients = [stranger(port, words, first) for words in STRANGERS]
    tasks = [first, begin(command, tmp_path, **of_srun(1, port))]
    assert [errors_of(task, code=0) for task in tasks] == [[], []]
    for client in clients:
        client.close()


@pytest.mark.slow
def test_a_stopped_process_ends_the_run_in_time(overrides_in, tmp_path):
    """A run of which all processes are stopped goes on; one stops when a collective times out."""
    folder = tmp_path / "runs" / "r"
    with running(overrides_in, tmp_path, program=("-c", IMPATIENT)) as [process]:
        os.killpg(process.pid, signal.SIGSTOP)
        while any(state_of(pid) != "T" for pid in [process.pid, *descendants(process.pid)]):
            time.sleep(0.01)
        last_step = metrics_file.read(folder)[-1]["step"]
        os.killpg(process.pid, signal.SIGCONT)
        wait_for_step(folder, last_step + 2, process)
        pid = pid_of([process], "rank 1")
        os.kill(pid, signal.SIGSTOP)
        [error] = errors_of(process, code=1)
        assert "does not answer" in error
        assert not is_alive(pid)
