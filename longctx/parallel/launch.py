"""Who starts the processes of a run, read from the environment before torch is imported.

torchrun sets six variables, srun its own. With `devices=N` alone, this process is rank 0 and starts
the others with torchrun's variables. torch's elastic launcher would import torch before it starts
any (3 s), and its ranks outlive it if it is killed: it asks the kernel for no signal at its end.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from longctx import system
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from longctx.system import STARTED_VARIABLE

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN = (*NUMBERS, "MASTER_ADDR", "MASTER_PORT")
OWN = "train.py"
EXIT = 20.0  # seconds that a process may take to exit
GRACE = 3.0  # seconds in which rank 0 tells why it ends; torchrun kills all after the first end
TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

_started: list[subprocess.Popen[bytes]] = []  # ranks 1, 2, ..., if this process started them


@dataclass(frozen=True)
class Launched:
    """The processes of a run, and this one's numbers among them."""

    by: str  # "torchrun", "srun" or "train.py", whose rank 0 starts the others
    ranks: int
    local_ranks: int  # on each node
    rank: int
    local_rank: int
    address: str = "127.0.0.1"  # of rank 0
    port: int = 0  # 0: not chosen yet

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return self.ranks // self.local_ranks

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        processes = "process" if self.ranks == 1 else "processes"
        return f"{self.by} starts {self.ranks} {processes}{nodes}"


def launched(config: TrainConfig | EvalConfig, environ: Mapping[str, str] = os.environ) -> Launched:
    """Return who starts the processes of a run, and how many there are.

    Raises ValueError if variables are missing or contradict one another, if devices= is not their
    number, or if context= does not divide it.
    """
    in_step = "SLURM_STEP_ID" in environ
    variables = [name for name in NUMBERS if name in environ]
    if variables and (len(variables) == len(NUMBERS) or not in_step):
        processes = _of_torchrun(environ)
    elif in_step and _number(environ, *TASKS, default=1) > 1:
        processes = _of_srun(environ)
    else:
        _check_allocation(config.devices, environ)
        processes = Launched(OWN, config.devices, config.devices, 0, 0)
    if config.devices not in (1, processes.ranks):
        raise ValueError(
            f"devices={config.devices}: {processes.by} has started {processes.ranks} processes; "
            f"leave devices out, or start {config.devices} processes"
        )
    config.context.check_degree(processes.ranks)
    return processes


@contextmanager
def started(processes: Launched) -> Iterator[Launched]:
    """Start the other processes of `devices=N` and yield `processes` with the port they meet at.

    The others end with the block. An error kills them at once, else they get EXIT seconds.
    """
    if processes.by != OWN or processes.rank or processes.ranks == 1:
        yield processes
        return
    # Free until rank 0 opens it for good; if another program is faster, rank 0 names the port
    with socket.create_server((processes.address, 0)) as free:
        port = free.getsockname()[1]
    # If rank 0 is killed before the ranks have met, the kernel ends the others
    end = partial(system.end_with_parent, os.getpid(), signal.SIGKILL)
    for rank in range(1, processes.ranks):
        numbers = (rank, processes.ranks, rank, processes.ranks, processes.address, port)
        variables = dict(zip(TORCHRUN, map(str, numbers), strict=True)) | {STARTED_VARIABLE: "1"}
        command = [sys.executable, *sys.orig_argv[1:]]
        environment = os.environ | variables
        _started.append(subprocess.Popen(command, env=environment, preexec_fn=end))
    try:
        yield Launched(OWN, processes.ranks, processes.ranks, 0, 0, processes.address, port)
        with suppress(subprocess.TimeoutExpired):
            for process in _started:
                process.wait(EXIT)
    finally:
        end_started()
        _started.clear()


def end_started() -> None:
    """Kill the processes started here: they may wait in a collective, or be stopped."""
    for process in _started:
        process.kill()


def ended_early() -> str:
    """Return a line that names a process started here if it has ended; "" if all run."""
    for rank, process in enumerate(_started, start=1):
        code = process.poll()
        if code is not None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return f"process {rank} (PID {process.pid}) has ended with {how}"
    return ""


def number_here(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank; 0 if the environment is not that of one process of several.

    The others are silent, so a number alone, such as RANK=7, must not silence the only process.
    """
    is_torchrun = all(name in environ for name in TORCHRUN)
    name, totals = ("RANK", ("WORLD_SIZE",)) if is_torchrun else ("SLURM_PROCID", TASKS)
    rank = environ.get(name, "")
    count = next((environ[total] for total in totals if total in environ), "")
    is_known = rank.isdecimal() and count.isdecimal()
    return int(rank) if is_known and int(rank) < int(count) else 0


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for a child that is no process of the run."""
    return {
        name: value
        for name, value in environ.items()
        if name not in (*TORCHRUN, STARTED_VARIABLE, "NODE_RANK", "GROUP_RANK")
        and not name.startswith(("TORCHELASTIC_", "SLURM_"))
    }


def _of_torchrun(environ: Mapping[str, str]) -> Launched:
    if missing := [name for name in TORCHRUN if name not in environ]:
        present = ", ".join(name for name in TORCHRUN if name in environ)
        raise ValueError(
            f"{', '.join(missing)}: not set, but {present} is; start with torchrun, which sets all "
            f"of {', '.join(TORCHRUN)}, or set none of them"
        )
    rank, ranks, local_rank, local_ranks = (_number(environ, name) for name in NUMBERS)
    if ranks % local_ranks:
        raise ValueError(
            f"WORLD_SIZE={ranks}: no multiple of LOCAL_WORLD_SIZE={local_ranks}; start as many "
            "processes on every node"
        )
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment"
    return Launched(
        OWN if STARTED_VARIABLE in environ else by,
        ranks,
        local_ranks,
        rank,
        local_rank,
        environ["MASTER_ADDR"],
        _number(environ, "MASTER_PORT"),
    )


def _of_srun(environ: Mapping[str, str]) -> Launched:
    ranks, nodes = _number(environ, *TASKS), _number(environ, *NODES, default=1)
    spread = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 4(x2) or 4,3
    if "," in spread or ranks % nodes:
        raise ValueError(
            f"SLURM: {spread or ranks} tasks on its {nodes} nodes; every node must have the same "
            "number, as with srun --ntasks-per-node=N"
        )
    hosts = next((environ[name] for name in NODE_LISTS if name in environ), "")
    first_host = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", hosts).split(",")[0]  # of gpu[07-09,12],cpu1
    address = environ.get("MASTER_ADDR", first_host if nodes > 1 else "127.0.0.1")
    # All tasks of a step know its numbers, and so agree on a port
    step = _number(environ, "SLURM_JOB_ID", default=0) + _number(environ, "SLURM_STEP_ID")
    return Launched(
        by="srun",
        ranks=ranks,
        local_ranks=ranks // nodes,
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        address=address,
        port=_number(environ, "MASTER_PORT", default=15000 + step % 10_000),
    )


def _check_allocation(devices: int, environ: Mapping[str, str]) -> None:
    """Raise ValueError if SLURM has allocated more than this one process starts, or mpirun has
    started more: each would train a run of its own.
    """
    if (processes := _number(environ, *MPI, default=1)) > 1:
        raise ValueError(
            f"mpirun: has started {processes} processes; use torchrun, srun or devices={processes}"
        )
    nodes, tasks = (_number(environ, *names, default=1) for names in (NODES, TASKS))
    if nodes > 1:
        raise ValueError(
            f"SLURM: {nodes} nodes, and one process on one of them; start one for each device with "
            "srun --ntasks-per-node=N python train.py ..., or allocate one node"
        )
    if "SLURM_STEP_ID" not in environ and tasks not in (1, devices):
        raise ValueError(
            f"devices={devices}: SLURM has set {tasks} tasks aside, and this is one process "
            f"without srun; put srun before python, or ask for devices={tasks}, or set "
            "SLURM_NTASKS=1"
        )


def _number(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """Return the value of the first of `names` that is set."""
    name = next((name for name in names if name in environ), names[0])
    if name not in environ and default is not None:
        return default
    text = environ.get(name, "")
    if not text.isdecimal():
        shown = f"{name}={text}" if name in environ else f"{name}: not set"
        raise ValueError(f"{shown}; not a number that torchrun or srun would set")
    return int(text)
