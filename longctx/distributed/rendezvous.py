"""Every process of a run arrives at a store before a process group is formed.

Collectives wait for a process that never comes without a word, for half an hour or for ever. Here
each one says where it is and what it has; the first one waits for them, checks that they fit
together, and tells the others whether the run begins. What is wrong is one line, of the first.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from longctx.distributed.launched import OWN, Launched, leave_to_first, leave_with_first
from longctx.planner import hardware
from longctx.planner.hardware import Machine

WAIT_VARIABLE = "LONGCTX_ARRIVAL_SECONDS"  # instead of
WAIT = 120.0  # seconds until all have arrived: torch alone takes 30 to import from a cold disk
PAUSE = 0.1  # seconds between two looks
REFUSES = 20.0  # seconds that the first process stays to tell those who arrive why it ends
ANSWER = 20.0  # seconds, longer than any answer of a store that lives takes
_meetings = itertools.count()  # of this process; the same number in every process of a run


@dataclass(frozen=True)
class Arrival:
    """What a process says of itself."""

    rank: int
    pid: int
    host: str
    local_rank: int
    device: str  # "cuda" or "cpu"
    gpus: int
    cores: int
    torch: str
    problem: str = ""  # why it cannot take part

    def __str__(self) -> str:
        has = f"{self.gpus} GPUs" if self.device == "cuda" else f"{self.cores} cores"
        return f"{self.host}: {has}"


class NotAll(Exception):
    """Processes are missing; the text names them."""


class Meeting:
    """A store that all processes of a run know, seen from one of them."""

    def __init__(self, launched: Launched, seconds: float) -> None:
        self.launched, self.seconds = launched, seconds
        self.deadline = time.monotonic() + seconds
        assert launched.port is not None
        self.place = f"{launched.address}:{launched.port}"
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps a store
        serves = launched.rank == 0 and not agent
        if serves:
            check_free(launched.port)
        else:
            self._wait_for_store()
        try:
            server = dist.TCPStore(
                launched.address,
                launched.port,
                is_master=serves,
                timeout=timedelta(seconds=ANSWER),
                wait_for_workers=False,
                multi_tenant=True,  # so that init_process_group takes it too
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"MASTER_ADDR={launched.address} MASTER_PORT={launched.port}: no store of this run "
                f"there ({first_line(error)}); give the first process's host and a free port"
            ) from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"longctx/{attempt}/{next(_meetings)}", server)

    def arrive(self, here: Arrival) -> None:
        """Say that this process is here."""
        self.store.set(f"process {here.rank}", json.dumps(asdict(here)))
        self.store.add(f"arrived {here.rank}", 1)

    def arrivals(self, started: Callable[[], str | None]) -> list[Arrival]:
        """Wait for every process, as the first one; NotAll where one does not come.

        `started` tells what happened to a process that this one has started and that ended.
        """
        missing = list(range(self.launched.ranks))
        with names_missing(lambda: self._not_all(missing, "before this one was told to end")):
            while True:
                problem = started()
                missing[:] = [x for x in missing if not self.store.check([f"arrived {x}"])]
                if not missing:
                    break
                if problem:
                    raise NotAll(problem)
                if time.monotonic() > self.deadline:
                    raise self._not_all(missing, f"within {self.seconds:.0f} s")
                time.sleep(PAUSE)
        for rank in range(self.launched.ranks):
            if self.store.add(f"arrived {rank}", 0) > 1:
                raise NotAll(f"two processes say that they are number {rank}; give each its own")
        return self.processes()

    def tell(self, problem: str) -> None:
        """Tell the others whether the run begins; where it does not, wait until they know."""
        self.store.set("problem", problem)
        others = self.launched.ranks - 1
        deadline = time.monotonic() + REFUSES
        while problem and self.store.add("told", 0) < others and time.monotonic() < deadline:
            time.sleep(PAUSE)

    def begins(self) -> bool:
        """Wait, as one of the others, until the first process has told whether the run begins."""
        while not self.store.check(["problem"]):
            leave_with_first(self.launched.rank)
            late = time.monotonic() - self.deadline
            if late > REFUSES or (late > 0 and not self.store.check(["arrived 0"])):
                raise NotAll(f"process 0 of {self.launched.ranks} has not arrived at {self.place}")
            time.sleep(PAUSE)
        problem = self.store.get("problem")
        self.store.add("told", 1)
        return not problem

    def processes(self) -> list[Arrival]:
        """All processes, once they have arrived."""
        texts = (self.store.get(f"process {rank}") for rank in range(self.launched.ranks))
        return [Arrival(**json.loads(text)) for text in texts]

    def _not_all(self, missing: list[int], when: str) -> NotAll:
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        word = "process" if len(missing) == 1 else "processes"
        verb = "has" if len(missing) == 1 else "have"
        return NotAll(
            f"{word} {names} of {self.launched.ranks} {verb} not arrived at {self.place} {when}; "
            f"see what it or its node says ({WAIT_VARIABLE}=N waits N seconds)"
        )

    def _wait_for_store(self) -> None:
        """Wait until something listens, without torch's warnings about each attempt."""
        while True:
            leave_with_first(self.launched.rank)
            try:
                port = self.launched.port
                socket.create_connection((self.launched.address, port), timeout=5).close()
                return
            except socket.gaierror:
                raise ValueError(
                    f"MASTER_ADDR={self.launched.address}: no host that {socket.gethostname()} "
                    "knows; give the first process's host"
                ) from None
            except OSError:
                if time.monotonic() > self.deadline:
                    raise NotAll(
                        f"process 0 of {self.launched.ranks} has not opened {self.place} within "
                        f"{self.seconds:.0f} s; see what it or its node says"
                    ) from None
            time.sleep(PAUSE)


def meet(
    config: TrainConfig | EvalConfig,
    launched: Launched,
    here: Arrival,
    started: Callable[[], str | None] = lambda: None,
) -> Meeting:
    """Wait until all processes of a run are here and fit together; then the run begins.

    Raises ValueError, one line, on the first process where one is missing or something is wrong;
    on the others SystemExit: the first one says it, or they where it is the one that is missing.
    """
    try:
        meeting = Meeting(launched, arrival_seconds())
        meeting.arrive(here)
        if launched.rank:
            if not meeting.begins():
                leave_to_first()
            return meeting
        try:
            arrivals = meeting.arrivals(started)
            problem = here.problem or misfit(arrivals)
        except NotAll as error:
            arrivals, problem = [here], str(error)
        if problem:
            problem += f" ({about(config, launched, arrivals)})"
        meeting.tell(problem)
    except (dist.DistError, RuntimeError, NotAll) as error:
        if launched.rank > 1 and launched.local_rank:
            raise SystemExit(2) from None  # others say so
        missing = isinstance(error, NotAll)
        problem = str(error) if missing else f"process 0 is gone ({first_line(error)})"
        print(f"error: {problem} ({about(config, launched, [here])})", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    if problem:
        raise ValueError(problem)
    is_said = launched.nodes == 1 and hardware.here() is None  # before torch was imported
    if not is_said and (note := crowded(arrivals)):
        print(f"note: {note}", file=sys.stderr, flush=True)
    return meeting


def refuse(launched: Launched, problem: str) -> None:
    """Tell the other processes, before they have met, that this one cannot take part, and why."""
    if launched.ranks == 1 or (launched.by == OWN and launched.rank == 0):
        return
    here = arrival(launched, "cpu", 0, problem)
    try:
        meeting = Meeting(launched, min(arrival_seconds(), REFUSES))
        meeting.arrive(here)
        if launched.rank:
            meeting.begins()
        else:
            meeting.tell(problem)
    except (dist.DistError, RuntimeError, NotAll, ValueError):
        pass  # the first process has the same problem, and has ended


def arrival(launched: Launched, device: str, gpus: int, problem: str = "") -> Arrival:
    """What this process says of itself."""
    return Arrival(
        rank=launched.rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        local_rank=launched.local_rank,
        device=device,
        gpus=gpus,
        cores=hardware.cores(),
        torch=str(torch.__version__),
        problem=problem,
    )


def misfit(arrivals: list[Arrival]) -> str:
    """What is wrong with the processes of a run together; empty where they fit."""
    first = arrivals[0]
    for one in arrivals:
        who = f"process {one.rank} on {one.host}"
        if one.problem:
            return f"{who}: {one.problem}"
        if one.device != first.device:
            return (
                f"{who} computes on {one.device}, the first on {first.device} ({first.host}); give "
                "device=cpu, or machines that all have GPUs"
            )
        if one.torch != first.torch:
            return f"{who} has torch {one.torch}, the first {first.torch}; install the same one"
    seats = Counter((one.host, one.local_rank) for one in arrivals)
    (host, number), count = seats.most_common(1)[0]
    if count > 1 and first.device == "cuda":
        return (
            f"LOCAL_RANK={number}: {count} processes on {host} have it and would share a GPU; "
            "count up on every machine"
        )
    return ""


def crowded(arrivals: list[Arrival]) -> str:
    """What is to be said of more processes on a CPU than it has cores; empty where it has them."""
    for host, count in Counter(one.host for one in arrivals if one.device == "cpu").items():
        here = min(one.cores for one in arrivals if one.host == host)
        if count > here:
            return (
                f"{count} processes share the {here} cores of {host}, which is slower than "
                f"devices={here}"
            )
    return ""


def about(config: TrainConfig | EvalConfig, launched: Launched, arrivals: list[Arrival]) -> str:
    """What was asked, what the launcher gave, what the machines have."""
    machines = list(dict.fromkeys(map(str, arrivals)))
    has = "; ".join(machines[:4]) + ("; ..." if len(machines) > 4 else "")
    return f"asked: {devices_of(config)}; {launched}; {has}"


def devices_of(config: TrainConfig | EvalConfig) -> str:
    """The devices that a request names, and how they share rows and weights."""
    return (
        f"devices={config.devices} context={config.context.degree} strategy={config.strategy.name}"
    )


def arrival_seconds() -> float:
    """How long the processes of a run wait for one another."""
    text = os.environ.get(WAIT_VARIABLE, str(WAIT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ValueError(f"{WAIT_VARIABLE}={text}: give a number of seconds")
    return seconds


def check_free(port: int) -> None:
    """Raise ValueError where another process of this machine listens on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"MASTER_PORT={port}: cannot be opened on {socket.gethostname()} "
                f"({error.strerror}); give another, or leave it out"
            ) from None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]


@contextmanager
def names_missing(problem: Callable[[], NotAll]) -> Iterator[None]:
    """Let SIGTERM inside the block raise `problem`: a launcher ends all when one process dies."""

    def end(number: int, frame: Any) -> None:
        raise problem()

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def too_few_gpus(config: TrainConfig | EvalConfig, launched: Launched, machine: Machine) -> str:
    """Why the processes of this machine cannot have a GPU each."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = f"there {'is' if machine.gpus == 1 else 'are'} {machine.gpus} here"
    shown = "" if visible is None else f", as CUDA_VISIBLE_DEVICES={visible} says"
    remedy = "start as many processes as there are"
    if launched.by == "srun" and machine.gpus == 1:
        remedy = "let every task see all GPUs of its node (srun --gpus-per-node=N --gpu-bind=none)"
    elif launched.by == OWN:
        remedy = f"use devices={machine.gpus}"
    return (
        f"devices={launched.local_ranks}: {there}{shown}; {remedy} (asked: "
        f"{devices_of(config)}; {launched}, {launched.local_ranks} on this machine)"
    )
