"""Who starts the processes of a run, read from the environment before torch is imported.

torchrun sets six variables, srun its own. With `devices=N` alone, the typed process supervises,
without torch: it starts every rank with torchrun's variables, passes signals on, names a lost rank
and ends the others. Library launchers listen on all interfaces and leave ranks behind if killed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from longctx import system
from longctx.config.eval_config import EvalConfig
from longctx.config.fields import refuse
from longctx.config.train_config import TrainConfig
from longctx.runs.run_folder import checkpoints
from longctx.system import STARTED_VARIABLE

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN = (*NUMBERS, "MASTER_ADDR", "MASTER_PORT")
ALIKE = "start as many processes on every node"
OWN, BY = "train.py", "LONGCTX_STARTED_BY"
LOOPBACK = "127.0.0.1"
EXIT = 20.0  # seconds that a process may take to exit
GRACE = 3.0  # seconds in which rank 0 tells why it ends; torchrun kills all after the first end
# Files in the folder that ranks of devices=N share with their supervisor
RUN, TOLD = "run", "told"  # the path of the run's folder; the failure has been printed


@dataclass(frozen=True)
class Launched:
    """The processes of a run, and this one's numbers among them."""

    by: str  # "torchrun", "srun", "the environment", or "train.py", which supervises
    ranks: int
    local_ranks: int  # on each node
    rank: int
    local_rank: int
    address: str = LOOPBACK  # of rank 0
    port: int = 0
    shared: str = ""  # a folder of the ranks of "train.py", once they are started

    @property
    def nodes(self) -> int:
        """Count the machines."""
        return self.ranks // self.local_ranks

    @property
    def are_to_start(self) -> bool:
        """Return True in the process that starts and supervises all of these."""
        return self.by == OWN and self.ranks > 1 and not self.shared


def launched(config: TrainConfig | EvalConfig, environ: Mapping[str, str] = os.environ) -> Launched:
    """Return who starts the processes of a run, and how many there are; ValueError if variables or
    keys contradict them.
    """
    given = _as_torchrun(environ)
    if "RANK" in given or "LOCAL_RANK" in given:
        rank, ranks, local_rank, local_ranks = (_number(given, name) for name in NUMBERS)
        uneven = f"WORLD_SIZE={ranks}: no multiple of LOCAL_WORLD_SIZE={local_ranks}; {ALIKE}"
        refuse((ranks % local_ranks, uneven))
        shared = given.get(STARTED_VARIABLE, "").partition(":")[2]
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in given else given.get(BY, "the environment")
        address = given.get("MASTER_ADDR", LOOPBACK), _number(given, "MASTER_PORT")
        processes = Launched(by, ranks, local_ranks, rank, local_rank, *address, shared)
    else:
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # each would train a run of its own
            others = _number(environ, name, 1)
            refuse((others > 1, f"mpirun has started {others} processes; use torchrun, devices=N"))
        processes = Launched(OWN, config.devices, config.devices, 0, 0)
    if config.devices not in (1, processes.ranks):
        raise ValueError(
            f"devices={config.devices}: {processes.by} has started {processes.ranks} processes; "
            f"leave devices out, or start {config.devices} processes"
        )
    config.context.check_degree(processes.ranks)
    return processes


def _as_torchrun(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return `environ` with torchrun's variables if srun has started several processes."""
    if "RANK" in environ or _number(environ, "SLURM_STEP_NUM_TASKS", 1) == 1:
        return environ
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_PROCID", "SLURM_LOCALID")
    ranks, nodes, rank, local_rank = (_number(environ, name) for name in names)
    spread = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 4(x2) or 4,3
    uneven = "," in spread or ranks % nodes
    refuse(
        (uneven, f"SLURM: {spread or ranks} tasks on {nodes} nodes; {ALIKE} (--ntasks-per-node)")
    )
    numbers = map(str, (rank, ranks, local_rank, ranks // nodes))
    hosts = environ.get("SLURM_STEP_NODELIST", LOOPBACK)
    first_host = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", hosts).split(",")[0]  # of gpu[07-09,12],cpu1
    # All tasks of a step know its numbers, and so agree on a port
    step = _number(environ, "SLURM_JOB_ID", 0) + _number(environ, "SLURM_STEP_ID", 0)
    usual = {BY: "srun", "MASTER_ADDR": first_host, "MASTER_PORT": str(15000 + step % 10_000)}
    return usual | dict(environ) | dict(zip(NUMBERS, numbers, strict=True))


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the value of a variable that a launcher sets."""
    text = environ.get(name, "" if default is None else str(default))
    shown = f"{name}={text}" if name in environ else f"{name}: not set"
    refuse((not text.isdecimal(), f"{shown}; not a number that torchrun or srun would set"))
    return int(text)


def supervise(processes: Launched) -> int:
    """Run the ranks of devices=N as children of this process; return the exit code. The first rank
    that fails decides it; it is 1 if a rank is killed, and one line names the rank.
    """
    pids: dict[int, int] = {}  # PID → rank
    ranks, most = processes.ranks, max(16, 4 * (os.cpu_count() or 1))
    refuse((ranks > most, f"devices={ranks}: this machine can run few; give at most {most}"))

    def send(number: int, _: object = None) -> None:
        for pid in list(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    with TemporaryDirectory(prefix="longctx-") as shared:
        try:
            for rank in range(processes.ranks):
                numbers = (rank, processes.ranks, rank, processes.ranks, LOOPBACK, 0)
                variables = dict(zip(TORCHRUN, map(str, numbers), strict=True))
                variables |= {BY: OWN, STARTED_VARIABLE: f"{os.getpid()}:{shared}"}
                command = [sys.executable, *sys.orig_argv[1:]]
                pids[os.posix_spawn(command[0], command, os.environ | variables)] = rank
            for number in system.SIGNALS:
                # nohup ignores SIGHUP, for the ranks too
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, send)
            signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
            return _follow(pids, Path(shared))
        finally:
            send(signal.SIGKILL)


def _follow(pids: dict[int, int], shared: Path) -> int:
    """Wait for the ranks `pids`; once one has failed, an alarm ends the others. Return the exit
    code.
    """
    ranks, line, code = len(pids), "", 0
    while pids:
        pid, status = os.wait()
        rank, ended = pids.pop(pid), os.waitstatus_to_exitcode(status)
        if code or not ended:
            # Rank 0 may have printed the same problem meanwhile
            line = "" if rank == 0 and ended > 0 else line
            continue
        how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
        if -ended in system.SIGNALS:
            ended = 128 - ended  # it had no handlers yet
        code = max(ended, 1)
        has_told = ended > 0 and (rank == 0 or (shared / TOLD).exists())
        if ended <= 128 and not has_told:
            line = (
                f"process {rank} (PID {pid}) of {ranks} has ended with {how}, and the run with it"
            )
        # Else ranks save, or rank 0 is about to print why the run fails
        is_over = ended < 0 or (ended < 128 and has_told)
        signal.setitimer(signal.ITIMER_REAL, 1e-3 if is_over else EXIT)
    if line:
        run = shared / RUN
        advice = f"; {resuming(Path(run.read_text(encoding='utf-8')))}" if run.exists() else ""
        print(f"error: {line}{advice}", file=sys.stderr, flush=True)
    return code


def join(processes: Launched) -> None:
    """Have this rank end with its launcher, and on a single machine use the loopback alone."""
    if processes.ranks == 1:
        return
    # Lightning reads them
    os.environ |= _as_torchrun(os.environ)
    os.environ["NODE_RANK"] = str(processes.rank // processes.local_ranks)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings would bury a line of ours
    if processes.nodes == 1:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    if processes.by in (OWN, "torchrun"):
        parent = os.environ.get(STARTED_VARIABLE, "").partition(":")[0]
        system.end_with_parent(int(parent or os.getppid()), signal.SIGKILL)


def resuming(folder: Path) -> str:
    """Return how the run in `folder` continues: from its newest checkpoint."""
    # Another machine may not have the folder
    if folder.is_dir() and not checkpoints(folder):
        return "it has no checkpoint yet; start it anew"
    return f"{system.typed_command()} resume {folder} continues it"


def number_here(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank; 0 if the environment is not that of one process of several: the
    others are silent, so a number alone, such as RANK=7, must not silence the only process.
    """
    names = NUMBERS[:2] if {*TORCHRUN} <= {*environ} else ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    with suppress(ValueError):
        rank, count = (_number(environ, name) for name in names)
        return rank if rank < count else 0
    return 0


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for a child that is no process of the run."""
    return {
        name: value
        for name, value in environ.items()
        if name not in (*TORCHRUN, BY, STARTED_VARIABLE, "NODE_RANK", "GROUP_RANK")
        and not name.startswith(("TORCHELASTIC_", "SLURM_"))
    }
