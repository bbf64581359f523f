"""Ranks meet before a process group is formed, and each notices from then on if another one ends.

NCCL waits half an hour for a rank that never comes or has died. So every rank keeps one connection
to rank 0. First each tells rank 0 its device, and rank 0 answers if all fit together. Later a rank
that fails tells why. The kernel closes the connections of a process that is killed. A process that
is stopped (SIGSTOP) keeps its connection: collectives time out.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from longctx import system
from longctx.parallel.launch import GRACE, OWN, Launched, end_started, ended_early
from longctx.runs.run_folder import checkpoints
from longctx.spec.hardware import Machine

ARRIVAL_VARIABLE = "LONGCTX_ARRIVAL_SECONDS"
ARRIVAL = 120.0  # seconds until all have arrived: torch alone takes 30 to import from a cold disk
COLLECTIVE_VARIABLE = "LONGCTX_COLLECTIVE_SECONDS"
COLLECTIVE = 1800.0  # seconds: a batch may take 10 minutes, a checkpoint longer
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a dead node: 40 s


class Arrival(NamedTuple):
    """A process, as it introduces itself to rank 0."""

    rank: int
    pid: int
    host: str
    device: str  # "cuda" or "cpu"
    torch: str  # its version
    problem: str  # the reason if it cannot take part, else ""

    def __str__(self) -> str:
        return f"process {self.rank} (PID {self.pid} on {self.host})"


@dataclass
class Meeting:
    """The processes of a run, as one of them knows them, from `meet` to `part`.

    Its thread ends this process if another one is lost or fails.
    """

    launched: Launched
    here: Arrival
    store: dist.Store
    peers: dict[Connection, Arrival]  # of rank 0: all others; of another rank: rank 0
    folder: Path | None = None  # of the run, to print how it continues
    is_decided: threading.Event = field(default_factory=threading.Event)
    is_ending: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Follow the other processes from now on."""
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def decided(self) -> None:
        """Tell the others, as rank 0, that the run is decided. The others wait without a limit:
        rank 0 may tokenize for hours.
        """
        if self.here.rank == 0:
            self.tell({"decided": True})
        else:
            self.is_decided.wait()

    def part(self) -> None:
        """Watch no more: the run has ended on every process."""
        self.is_ending.set()
        self.tell({"goodbye": True})

    def fail(self, problem: str, code: int) -> bool:
        """End the other processes with `code`, since this one has a `problem`.

        Rank 0 prints the problem of another rank. Return False if it is gone before that.
        """
        if self.here.rank:
            # If rank 0 fails too, it prints its own problem and ends this rank meanwhile
            time.sleep(GRACE)
        self.is_ending.set()
        self.tell({"problem": problem or "failed", "code": code})
        if self.here.rank == 0:
            return True
        # The thread ends with the connection to rank 0
        self.thread.join(2 * GRACE)
        return not self.thread.is_alive()

    def tell(self, message: dict[str, Any]) -> None:
        """Send `message` to rank 0, or as rank 0 to all others."""
        for peer in self.peers:
            with suppress(OSError):
                peer.send_bytes(json.dumps(message).encode())

    def _watch(self) -> None:
        """Read every connection until its goodbye."""
        open_peers = dict(self.peers)
        while open_peers:
            for ready in connection.wait(list(open_peers)):
                assert isinstance(ready, Connection)
                other = open_peers[ready]
                try:
                    message = json.loads(ready.recv_bytes())
                except (EOFError, OSError):
                    # The process is gone, or its node
                    message = {"problem": "", "code": 1}
                if "goodbye" in message:
                    del open_peers[ready]
                elif "decided" in message:
                    self.is_decided.set()
                else:
                    return self._end(other, **message)

    def _end(self, other: Arrival, problem: str, code: int) -> None:
        """End this process because `other` has failed with `problem`, or is gone without one."""
        if self.is_ending.is_set():
            return
        is_lost = not problem
        if is_lost:
            problem = f"{other} of {self.launched.ranks} is gone, and the run with it"
            problem += f"; {go_on(self.folder)}" if self.folder else ""
        elif self.here.rank == 0:
            problem = f"{other}: {problem}"
        # Rank 0 prints; rank 1 does if rank 0 is the one that is gone
        if self.here.rank == 0 or (is_lost and self.here.rank == 1):
            print(f"error: {problem}", file=sys.stderr, flush=True)
        else:
            # torchrun ends all ranks as soon as one has ended, the printing one too
            time.sleep(GRACE / 2)
        self.tell({"problem": problem, "code": code})
        end_started()
        os._exit(code)


def meet(launched: Launched, here: Arrival) -> Meeting:
    """Wait until all processes of a run are here and fit together.

    If one is missing or does not fit, rank 0 raises ValueError, one line. The others raise
    SystemExit, and print a line only if rank 0 itself is missing.
    """
    seconds = float(os.environ.get(ARRIVAL_VARIABLE, ARRIVAL))
    with named(launched, seconds):
        store = open_store(launched, seconds)
        if launched.rank:
            meeting = _join(launched, here, store, seconds)
    if launched.rank == 0:
        peers, problem = _gather(launched, store, seconds)
        problem = problem or misfit(sorted([here, *peers.values()]))
        meeting = Meeting(launched, here, store, peers)
        meeting.tell({"problem": problem, "here": here})
        if problem:
            raise ValueError(f"{problem} ({launched})")
    elif launched.by == OWN:
        # From now on rank 1 prints a line if rank 0 is killed, so it must live on
        system.end_with_parent(os.getppid(), 0)
    meeting.watch()
    return meeting


def open_store(launched: Launched, seconds: float) -> dist.Store:
    """Return torch's store of the run: rank 0 serves it, unless torchrun's agent does."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = dist.TCPStore(
        launched.address,
        launched.port,
        is_master=launched.rank == 0 and not has_agent,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )
    # torchrun's agent keeps its store over a restart: old keys must not count
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"longctx/{attempt}", server)


def _gather(
    launched: Launched, store: dist.Store, seconds: float
) -> tuple[dict[Connection, Arrival], str]:
    """Return, as rank 0, a connection to every other process, and which ones do not come."""
    deadline = time.monotonic() + seconds
    peers: dict[Connection, Arrival] = {}
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        server.settimeout(0.2)
        store.set("meeting", str(server.getsockname()[1]))
        while len(peers) < launched.ranks - 1:
            if problem := ended_early():
                return peers, problem
            if time.monotonic() > deadline:
                arrived = {arrival.rank for arrival in peers.values()}
                missing = [str(rank) for rank in range(1, launched.ranks) if rank not in arrived]
                ranks = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
                return peers, (
                    f"processes {ranks} of {launched.ranks} have not arrived at {launched.address}:"
                    f"{launched.port} within {seconds:.0f} s; see what they or their nodes say "
                    f"({ARRIVAL_VARIABLE}=N waits N seconds)"
                )
            # Nobody came within the 0.2 s, or went again
            with suppress(OSError, EOFError):
                peer = _connection(server.accept()[0])
                peers[peer] = Arrival(*json.loads(peer.recv_bytes()))
    return peers, ""


def _join(launched: Launched, here: Arrival, store: dist.Store, seconds: float) -> Meeting:
    """Return the meeting, as another rank, once rank 0 has found that all processes fit."""
    address = launched.address, int(store.get("meeting"))
    peer = _connection(socket.create_connection(address, timeout=seconds))
    peer.send_bytes(json.dumps(here).encode())
    verdict = json.loads(peer.recv_bytes())
    if verdict["problem"]:
        raise SystemExit(2)  # rank 0 prints it
    return Meeting(launched, here, store, {peer: Arrival(*verdict["here"])})


def _connection(stream: socket.socket) -> Connection:
    """Return `stream` as a connection that ends within 40 s if the other node loses its power."""
    stream.setblocking(True)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        # macOS has other names
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(stream.detach())


@contextmanager
def named(launched: Launched, seconds: float) -> Iterator[None]:
    """Name the address of rank 0 if it cannot be opened or reached.

    Other ranks print the line themselves, one on each node.
    """
    try:
        yield
    except (dist.DistError, RuntimeError, OSError, EOFError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
        address = f"MASTER_ADDR={launched.address} MASTER_PORT={launched.port}"
        if launched.rank == 0:
            raise ValueError(
                f"{address}: cannot be opened on {socket.gethostname()} ({reason}); give the "
                "address of this process and a free port"
            ) from None
        if launched.local_rank == 0 or launched.rank == 1:
            print(
                f"error: {address}: process 0 of {launched.ranks} is not there within "
                f"{seconds:.0f} s, or is gone ({reason}); see what it or its node says",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(2) from None


def misfit(arrivals: list[Arrival]) -> str:
    """Return the reason if processes cannot form one run; "" if they can."""
    first, *others = arrivals
    if first.problem:
        return first.problem
    for other, rank in zip(others, range(1, len(arrivals)), strict=True):
        if other.problem:
            return f"{other}: {other.problem}"
        if other.rank != rank:
            return f"no process has RANK={rank}; count from 0, and give each process its own"
        if other.device != first.device:
            return (
                f"{other} computes on {other.device}, rank 0 on {first.device} ({first.host}); "
                "give device=cpu, or machines that all have GPUs"
            )
        if other.torch != first.torch:
            return f"{other} has torch {other.torch}, rank 0 {first.torch}; install the same one"
    return ""


def too_few_gpus(launched: Launched, machine: Machine) -> str:
    """Return the line for a machine with fewer GPUs than processes."""
    remedy = "start as many processes as there are"
    if launched.by == "srun" and machine.gpus == 1:
        remedy = "let every task see all GPUs of its node (srun --gpus-per-node=N --gpu-bind=none)"
    elif launched.by == OWN:
        remedy = f"use devices={machine.gpus}"
    return (
        f"devices={launched.local_ranks}: torch finds {machine.gpus} GPUs on this machine, see "
        f"CUDA_VISIBLE_DEVICES; {remedy}"
    )


def arrival(rank: int, device: str, problem: str) -> Arrival:
    """Return this process as it introduces itself to rank 0."""
    version = str(torch.__version__)
    return Arrival(rank, os.getpid(), socket.gethostname(), device, version, problem)


def collective_timeout() -> timedelta:
    """Return how long a rank waits for another one inside a collective."""
    return timedelta(seconds=float(os.environ.get(COLLECTIVE_VARIABLE, COLLECTIVE)))


def go_on(folder: Path) -> str:
    """Return how the run in `folder` continues: from its newest checkpoint."""
    # Another machine may not have the folder
    if folder.is_dir() and not checkpoints(folder):
        return "it has no checkpoint yet; start it anew"
    return f"{system.typed_command()} resume {folder} goes on"
