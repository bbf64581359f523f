"""What has started the processes of a run, read from the environment before torch is imported.

torchrun sets six variables, srun its own; without either, the first process starts the others. A
mismatch that is not found here shows as processes that wait for one another without end.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig

OWN_VARIABLE = "LONGCTX_DEVICES"  # set by the first process for those that it starts
FIRST_VARIABLE = "LONGCTX_FIRST"  # and its PID
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN = (*NUMBERS, "MASTER_ADDR", "MASTER_PORT")
OWN = "train.py"
FIRST_SPEAKS = 5.0  # seconds; torchrun ends all processes as soon as one has ended


@dataclass(frozen=True)
class Launched:
    """The processes of a run, and this one's numbers among them."""

    by: str  # "torchrun", "srun" or "train.py", whose first process starts the others
    ranks: int
    local_ranks: int  # on each machine
    rank: int
    local_rank: int
    address: str = "127.0.0.1"  # where the first process listens
    port: int | None = None  # None: any that is free

    @property
    def nodes(self) -> int:
        """Machines that have a part of the processes."""
        return self.ranks // self.local_ranks

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        processes = "process" if self.ranks == 1 else "processes"
        return f"{self.by} starts {self.ranks} {processes}{nodes}"


def launched(config: TrainConfig | EvalConfig, environ: Mapping[str, str] = os.environ) -> Launched:
    """Who starts the processes of a run, and how many there are.

    Raises ValueError where variables are missing or contradict one another, where devices= asks for
    another number than there is, or context= does not divide it.
    """
    in_step = "SLURM_STEP_ID" in environ
    variables = [name for name in NUMBERS if name in environ]
    if OWN_VARIABLE in environ:
        return _own(config.devices, environ)
    if variables and (len(variables) == len(NUMBERS) or not in_step):
        processes = _of_torchrun(environ)
    elif in_step and _tasks(environ) > 1:
        processes = _of_srun(environ)
    else:
        _check_allocation(config.devices, environ)
        config.context.check_degree(config.devices)
        return _own(config.devices, environ)
    if config.devices not in (1, processes.ranks):
        raise ValueError(
            f"devices={config.devices}: {processes.by} has started {processes.ranks} processes; "
            f"leave devices out, or start {config.devices} processes"
        )
    config.context.check_degree(processes.ranks)
    return processes


def number_here(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's number; 0 if the environment is not that of one process of several.

    The others are silent, so a number alone, such as RANK=7, must not silence the only process.
    """
    if OWN_VARIABLE in environ:
        name, total = "LOCAL_RANK", OWN_VARIABLE
    elif all(name in environ for name in TORCHRUN):
        name, total = "RANK", "WORLD_SIZE"
    else:
        name, total = "SLURM_PROCID", "SLURM_NTASKS"
        total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else total
    number, count = environ.get(name, ""), environ.get(total, "")
    is_known = number.isdecimal() and count.isdecimal()
    return int(number) if is_known and int(number) < int(count) else 0


def leave_to_first() -> None:
    """End this process without a word, unless it is the first one, which says what is wrong."""
    if number_here():
        time.sleep(FIRST_SPEAKS)
        raise SystemExit(2)


def leave_with_first(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """End this process without a word where the first one started it and has ended."""
    if rank and environ.get(FIRST_VARIABLE, str(os.getppid())) != str(os.getppid()):
        raise SystemExit(2)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child that is no process of the run."""
    return {
        name: value
        for name, value in environ.items()
        if name not in (*TORCHRUN, OWN_VARIABLE, FIRST_VARIABLE, "NODE_RANK", "GROUP_RANK")
        and not name.startswith(("TORCHELASTIC_", "SLURM_"))
    }


def _own(devices: int, environ: Mapping[str, str]) -> Launched:
    rank = _number(environ, "LOCAL_RANK") if OWN_VARIABLE in environ else 0
    port = _port(environ) if "MASTER_PORT" in environ else None
    address = environ.get("MASTER_ADDR", "127.0.0.1")
    return Launched(OWN, devices, devices, rank, rank, address, port)


def _of_torchrun(environ: Mapping[str, str]) -> Launched:
    if missing := [name for name in TORCHRUN if name not in environ]:
        there = ", ".join(name for name in TORCHRUN if name in environ)
        raise ValueError(
            f"{', '.join(missing)}: not set, and {there} {'is' if ',' not in there else 'are'}; "
            f"start with torchrun, which sets all of {', '.join(TORCHRUN)}, or set none of them"
        )
    rank, ranks, local_rank, local_ranks = (_number(environ, name) for name in NUMBERS)
    for name, value, most in (("RANK", rank, ranks), ("LOCAL_RANK", local_rank, local_ranks)):
        if value >= most:
            total = "WORLD_SIZE" if name == "RANK" else "LOCAL_WORLD_SIZE"
            raise ValueError(f"{name}={value}: of {total}={most} processes; count from 0")
    if not local_ranks or ranks % local_ranks:
        raise ValueError(
            f"WORLD_SIZE={ranks}: no multiple of LOCAL_WORLD_SIZE={local_ranks}; start as many "
            "processes on every node"
        )
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment"
    address = environ["MASTER_ADDR"]
    return Launched(by, ranks, local_ranks, rank, local_rank, address, _port(environ))


def _of_srun(environ: Mapping[str, str]) -> Launched:
    ranks, nodes = _tasks(environ), _nodes(environ)
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    spread = _spread(environ)
    if len(set(spread)) > 1 or ranks % nodes:
        there = ", ".join(map(str, spread)) or f"{ranks} in all"
        raise ValueError(
            f"SLURM: {there} tasks on its {nodes} nodes; every node must have the same number, as "
            "with srun --ntasks-per-node=N"
        )
    for name, value in (("WORLD_SIZE", ranks), ("RANK", rank), ("LOCAL_RANK", local_rank)):
        if name in environ and environ[name] != str(value):
            raise ValueError(
                f"{name}={environ[name]}: srun has it {value}; leave it out of the environment"
            )
    address = environ.get("MASTER_ADDR")
    if address is None and nodes > 1:
        address = _first_node(environ)
    return Launched(
        by="srun",
        ranks=ranks,
        local_ranks=ranks // nodes,
        rank=rank,
        local_rank=local_rank,
        address=address or "127.0.0.1",
        port=_port(environ) if "MASTER_PORT" in environ else _port_of_job(environ),
    )


def _check_allocation(devices: int, environ: Mapping[str, str]) -> None:
    """Raise ValueError where SLURM has set more aside than this one process starts."""
    nodes = _nodes(environ)
    if nodes > 1:
        raise ValueError(
            f"SLURM: {nodes} nodes, and one process on one of them; start one for each device with "
            "srun --ntasks-per-node=N python train.py ..., or allocate one node"
        )
    tasks = int(environ.get("SLURM_NTASKS", "1"))
    if "SLURM_STEP_ID" not in environ and tasks not in (1, devices):
        raise ValueError(
            f"devices={devices}: SLURM has set {tasks} tasks aside, and this is one process "
            f"without srun; put srun before python, or ask for devices={tasks}, or set "
            "SLURM_NTASKS=1"
        )


def _tasks(environ: Mapping[str, str]) -> int:
    return _first_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def _nodes(environ: Mapping[str, str]) -> int:
    names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return max(1, _first_number(environ, *names))


def _first_number(environ: Mapping[str, str], *names: str) -> int:
    """The first of `names` that is set; 1 where none is."""
    return next((_number(environ, name) for name in names if name in environ), 1)


def _spread(environ: Mapping[str, str]) -> list[int]:
    """Tasks of each node, which SLURM writes as 4(x2),3; empty where it does not say."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]


def _first_node(environ: Mapping[str, str]) -> str:
    """The first host of a list such as gpu[07-09,12],cpu1."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if nodes := environ.get(name):
            return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).split(",")[0]
    raise ValueError(
        "MASTER_ADDR: not set, and no list of SLURM's nodes either; set it to the first node's name"
    )


def _port_of_job(environ: Mapping[str, str]) -> int:
    """A port that all processes of a SLURM step know."""
    job, step = (environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 15000 + sum(int(x) for x in (job, step) if x.isdecimal()) % 10_000


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT={port}: no port; give a number from 1 to 65535")
    return port


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name)
    if value is None:
        raise ValueError(f"{name}: not set; start with srun or torchrun, which set it")
    if not value.isdecimal():
        raise ValueError(f"{name}={value}: not a number; unset it, or start with torchrun or srun")
    return int(value)
