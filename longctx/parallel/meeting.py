"""Ranks meet before a process group is formed, and each notices from then on if another one ends.

NCCL waits half an hour for a rank that never comes or has died. So each rank leaves its device in a
store, and rank 0 looks whether all fit. Keys are polled: torch hears no signal while it waits. A
supervisor sees a rank that dies. Under torchrun and srun each rank keeps a connection to rank 0,
which the kernel closes if the process is killed. If one is stopped (SIGSTOP), collectives time out.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from longctx.config.fields import refuse
from longctx.parallel.launch import GRACE, LOOPBACK, RUN, TOLD, Launched, resuming

ARRIVAL_VARIABLE = "LONGCTX_ARRIVAL_SECONDS"
ARRIVAL = 120.0  # seconds until all have arrived: torch alone takes 30 to import from a cold disk
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a dead node: 40 s
READING = 1.0  # seconds within which a greeting or last words must come
GREETING = b"longctx rank %d"
GOODBYE = b"0"  # last words are an exit code; none from a process that is lost


class Arrival(NamedTuple):
    """A process, as it introduces itself to rank 0."""

    rank: int
    pid: int
    host: str
    computes_on: str  # such as "cuda with torch 2.13.0"
    problem: str  # the reason if it cannot take part, else ""

    def __str__(self) -> str:
        return f"process {self.rank} (PID {self.pid} on {self.host})"


class Meeting:
    """The processes of a run, as one of them knows them, until it says GOODBYE."""

    def __init__(self, launched: Launched, here: Arrival) -> None:
        """Wait until all are here and fit together. Else rank 0 raises ValueError, one line; others
        raise SystemExit, and print a line only if rank 0 itself is missing.
        """
        self.launched, self.here = launched, here
        self.address = LOOPBACK if launched.nodes == 1 else launched.address
        self.seconds = float(os.environ.get(ARRIVAL_VARIABLE, ARRIVAL))
        self.folder: Path | None = None  # of the run, to print how it continues
        self.is_ending = False
        self.store = self._open_store()
        self.store.set(f"here/{here.rank}", json.dumps(here))
        # A connection to each other rank, from others to rank 0, unless a supervisor sees them all
        self.peers: dict[socket.socket, Arrival] = {}
        if here.rank == 0:
            self._gather()
        elif not launched.shared:
            self._join()
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, folder: Path | None) -> None:
        """Note the folder of the run, to print how it continues."""
        self.folder = folder
        if self.launched.shared and folder is not None and self.here.rank == 0:
            Path(self.launched.shared, RUN).write_text(str(folder), encoding="utf-8")

    def fail(self, problem: str, code: int) -> None:
        """End the other processes with `code`, since this one has a `problem`. Rank 0 has printed
        its own; the first of the others prints it.
        """
        # If rank 0 fails too, it prints its own problem and ends this rank meanwhile
        time.sleep(GRACE if self.here.rank else 0)
        if self.store.add("failed", 1) == 1 and self.here.rank:
            _print(f"{self.here}: {problem}")
            if self.launched.shared:
                Path(self.launched.shared, TOLD).touch()
        self.say(str(code).encode())

    def say(self, words: bytes) -> None:
        """Send the last words of this process, and watch no more."""
        self.is_ending = True
        for peer in self.peers:
            with suppress(OSError):
                peer.sendall(words)
                peer.shutdown(socket.SHUT_WR)

    def _watch(self) -> None:
        """End this process if a peer has failed or is lost."""
        peers = dict(self.peers)
        while peers:
            for ready in connection.wait(list(peers)):
                assert isinstance(ready, socket.socket)
                other, words = peers.pop(ready), b""
                with suppress(OSError):
                    words = ready.recv(8)
                if words != GOODBYE and not self.is_ending:
                    self._end(other, words)

    def _end(self, other: Arrival, words: bytes) -> None:
        """End this process as the last `words` of `other` say, or because it is lost."""
        # Rank 0 prints; rank 1 does if rank 0 is lost
        if not words and self.here.rank < 2:
            line = f"{other} of {self.launched.ranks} is gone, and the run with it"
            _print(f"{line}; {resuming(self.folder)}" if self.folder else line)
        else:
            # torchrun ends all ranks as soon as one has ended, the printing one too
            time.sleep(GRACE / 2)
        self.say(words or b"1")
        os._exit(int(words or b"1"))

    def _open_store(self) -> dist.Store:
        """Return torch's store: a file for the ranks of a supervisor. Otherwise rank 0 serves it,
        on one machine on loopback alone, or torchrun's agent does.
        """
        launched = self.launched
        if launched.shared:
            return dist.FileStore(f"{launched.shared}/store", launched.ranks)
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = launched.address if has_agent else self.address
        serves, listening = launched.rank == 0 and not has_agent, None
        limit = timedelta(seconds=self.seconds)
        try:
            if serves and address == LOOPBACK:
                # torch itself listens on all interfaces (pytorch#173909)
                listening = socket.create_server((address, launched.port)).detach()
            arguments = (address, launched.port, None, serves, limit, False)
            store = dist.TCPStore(*arguments, master_listen_fd=listening)
        except (RuntimeError, OSError) as error:
            self._refuse(error)
        # torchrun's agent keeps its store over a restart: old keys must not count
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"longctx/{attempt}", store)

    def _gather(self) -> None:
        """Wait, as rank 0, for the others; connect to them if no supervisor watches."""
        launched = self.launched
        keys = {f"here/{rank}": str(rank) for rank in range(1, launched.ranks)}
        absent = missing(self.store, keys, self.seconds)
        arrivals = [Arrival(*json.loads(self.store.get(key))) for key in keys if key not in absent]
        problem = misfit([self.here, *arrivals])
        if absent or problem:
            self.store.set("port", "0")
        elif not launched.shared:
            is_wide = launched.nodes > 1 and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if is_wide else socket.AF_INET
            address = ("" if launched.nodes > 1 else LOOPBACK, 0)
            with socket.create_server(address, family=family, dualstack_ipv6=is_wide) as server:
                self.store.set("port", str(server.getsockname()[1]))
                self.peers = greeted(server, arrivals, self.seconds)
            absent = [f"here/{x.rank}" for x in arrivals if x not in self.peers.values()]
        if absent:
            ranks = ", ".join(keys[key] for key in absent)
            problem = (
                f"processes {ranks} of {launched.ranks} have not arrived at {launched.address}:"
                f"{launched.port} within {self.seconds:.0f} s; see what they or their nodes say "
                f"({ARRIVAL_VARIABLE}=N waits N seconds)"
            )
        refuse((problem, problem))

    def _join(self) -> None:
        """Connect to rank 0 once it has found that all processes fit."""
        port = 0
        # The store goes with rank 0, which prints the reason
        with suppress(RuntimeError):
            if missing(self.store, ["port"], 2 * self.seconds):
                self._refuse(TimeoutError("it does not answer"))
            first = Arrival(*json.loads(self.store.get("here/0")))
            port = int(self.store.get("port"))
        if not port:
            raise SystemExit(2)
        try:
            peer = socket.create_connection((self.address, port), timeout=self.seconds)
            peer.sendall(GREETING % self.here.rank)
        except OSError as error:
            self._refuse(error)
        self.peers[kept_alive(peer)] = first

    def _refuse(self, error: Exception) -> NoReturn:
        """Name the address of rank 0, which cannot be opened or reached because of `error`."""
        launched = self.launched
        reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
        line = (
            f"MASTER_ADDR={launched.address} MASTER_PORT={launched.port}: process 0 of "
            f"{launched.ranks} cannot listen there, or is gone ({reason}); give its address and a "
            "free port, and see what it or its node says"
        )
        refuse((launched.rank == 0, line))
        if launched.local_rank == 0 or launched.rank == 1:  # one on each node
            _print(line)
        raise SystemExit(2) from None


def missing(store: dist.Store, keys: Iterable[str], seconds: float) -> list[str]:
    """Wait so many seconds for `keys` of `store`; return the missing ones."""
    begun = time.monotonic()
    while absent := [key for key in keys if not store.check([key])]:
        waited = time.monotonic() - begun
        if waited > seconds:
            break
        time.sleep(min(0.02 + waited / 20, 1.0))
    return absent


def greeted(
    server: socket.socket, arrivals: Iterable[Arrival], seconds: float
) -> dict[socket.socket, Arrival]:
    """Return a connection to `server` from each of `arrivals` that greets within `seconds`; anybody
    else may be silent for READING seconds.
    """
    awaited = {GREETING % other.rank: other for other in arrivals}
    peers: dict[socket.socket, Arrival] = {}
    deadline = time.monotonic() + seconds
    server.settimeout(0.2)
    while awaited and time.monotonic() < deadline:
        # Nobody came within the 0.2 s, or said nothing
        with suppress(OSError):
            peer = kept_alive(server.accept()[0])
            if other := awaited.pop(peer.recv(len(GREETING) + 8), None):
                peers[peer] = other
    return peers


def kept_alive(peer: socket.socket) -> socket.socket:
    """Return `peer` with limits: on reading, and 40 s until the loss of its node closes it."""
    peer.settimeout(READING)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if option := getattr(socket, name, None):  # macOS has other names
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return peer


def misfit(arrivals: list[Arrival]) -> str:
    """Return the reason if processes cannot form one run; "" if they can."""
    first = arrivals[0]
    for other in arrivals:
        if other.problem:
            return f"{other}: {other.problem}" if other.rank else other.problem
        if other.computes_on != first.computes_on:
            return (
                f"{other} computes on {other.computes_on}, rank 0 on {first.computes_on} "
                f"({first.host}); install the same torch, and use device=cpu or GPUs everywhere"
            )
    return ""


def _print(problem: str) -> None:
    print(f"error: {problem}", file=sys.stderr, flush=True)
