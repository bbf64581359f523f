"""The processes of a run watch one another: where one dies, fails or stands still, all end.

Every process counts up a number in a store of torch.distributed, from a thread of its own, and
reads those of the others. A process that waits inside a collective cannot notice by itself that
the one it waits for is gone; a number that stands still shows it, also where that process was
stopped by a signal.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

EVERY = 2.0  # seconds between beats
SILENCE = 40.0  # seconds without a beat after which a process is given up
FAILED = "failed"  # the key under which a process leaves what went wrong


class Heartbeat:
    """Beats for process `rank` of `ranks` and listens to the others, until `stop`.

    `share` tells every process what the first one gives it. `give_up` ends this process; it gets
    the line that names the one at fault, and whether this one is to say it.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        share: Callable[[int], int],
        give_up: Callable[[str, bool], None],
    ) -> None:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        wait = timedelta(seconds=SILENCE)
        self.rank, self.ranks, self.give_up = rank, ranks, give_up
        if rank == 0:
            self.store = dist.TCPStore(
                host, 0, is_master=True, timeout=wait, wait_for_workers=False
            )
            share(self.store.port)
        else:
            self.store = dist.TCPStore(host, share(0), is_master=False, timeout=wait)
        self.store.set(f"process {rank}", f"{os.getpid()} {socket.gethostname()}")
        self.stopped = threading.Event()
        self.processes = [
            self.store.get(f"process {other}").decode().split(" ", 1) for other in range(ranks)
        ]
        self.heard = time.monotonic()  # when the store last answered
        works = self._run, self._watch_store
        self.threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self.threads:
            thread.start()

    def fail(self, problem: str) -> None:
        """Tell the others why this process ends."""
        if not self.stopped.is_set():
            self.stopped.set()
            self.store.set(FAILED, f"process {self.rank}: {problem}")

    def stop(self) -> None:
        """Beat and listen no more: the run has ended on every process.

        Waits for the threads, which must not be inside the store when the process exits.
        """
        self.stopped.set()
        for thread in self.threads:
            thread.join(SILENCE)

    def _run(self) -> None:
        beats = [(-1, time.monotonic()) for _ in range(self.ranks)]  # of each: last number, when
        try:
            while not self.stopped.wait(EVERY):
                self.heard = time.monotonic()
                self.store.add(f"beat {self.rank}", 1)
                if self.store.check([FAILED]):
                    return self._end(self.store.get(FAILED).decode(), False)  # it said so itself
                now = time.monotonic()
                for other in range(self.ranks):
                    number = self.store.add(f"beat {other}", 0)
                    if number != beats[other][0]:
                        beats[other] = number, now
                    elif now - beats[other][1] > SILENCE:
                        return self._end_without(other)
        except (RuntimeError, OSError):  # the store went with the first process
            self._end("process 0 is gone", self.rank == 1)

    def _watch_store(self) -> None:
        """Notice that the first process stands still: then its store answers nobody."""
        while not self.stopped.wait(EVERY):
            if time.monotonic() - self.heard > SILENCE:
                self._end_without(0)

    def _end_without(self, other: int) -> None:
        """End this process, and `other` too, which may be stopped, where it is on this machine."""
        pid, host = self.processes[other]
        if host == socket.gethostname():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        says = self.rank == (1 if other == 0 else 0)
        silence = f"has given no sign of life for {SILENCE:.0f} s"
        self._end(f"process {other} of {self.ranks} (PID {pid} on {host}) {silence}", says)

    def _end(self, problem: str, says: bool) -> None:
        if not self.stopped.is_set():
            self.give_up(problem, says)
