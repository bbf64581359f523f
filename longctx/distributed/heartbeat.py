"""The processes of a run watch one another: where one dies, fails or stands still, all end.

Every process counts up a number in the store where they met, from a thread of its own, and reads
those of the others. A process that waits inside a collective cannot notice by itself that the one
it waits for is gone; a number that stands still shows it, also where that process was stopped by a
signal. On the same machine the process itself is looked at, which shows it sooner.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from longctx.distributed.rendezvous import Arrival
from longctx.python_child import typed_command
from longctx.runs.run_folder import checkpoints

EVERY = 2.0  # seconds between beats
SILENCE = 40.0  # seconds without a beat after which a process is given up
STOPPED = 5 * EVERY  # seconds between beats after which this process itself was stopped for a while
SILENT = f"has given no sign of life for {SILENCE:.0f} s"
GONE = "is gone"
FAILED = "failed"  # the key under which a process leaves what went wrong
RUN_VARIABLE = "LONGCTX_RUN"  # the run's folder, for what is said about a process that is lost


class Heartbeat:
    """Beats for process `rank` of `processes` in `store` and listens to the others, until `stop`.

    `give_up` ends this process; it gets the line that names the one at fault, whether this one is
    to say it, and the exit code. `how_ended` says what became of a process, where this one knows.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        processes: Sequence[Arrival],
        give_up: Callable[[str, bool, int], None],
        how_ended: Callable[[int], str | None],
    ) -> None:
        self.store, self.rank, self.give_up, self.how_ended = store, rank, give_up, how_ended
        self.processes, self.ranks = processes, len(processes)
        host = socket.gethostname()
        self.here = [one for one in processes if one.host == host and is_alive(one.pid)]
        self.stopped = threading.Event()
        self.heard = time.monotonic()  # when the store last answered
        works = self._run, self._watch_store
        self.threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self.threads:
            thread.start()

    @property
    def is_watching(self) -> bool:
        """Whether it listens to the others, or ends this process just now."""
        return any(thread.is_alive() for thread in self.threads)

    def decided(self, first: bool) -> None:
        """Wait, where not `first`, until the first process has decided what is to be run, however
        long that takes.
        """
        if first:
            self.store.set("decided", "yes")
        try:
            while not self.store.check(["decided"]):
                time.sleep(0.1)
        except (RuntimeError, OSError):  # the store is gone, which the beats end this process for
            time.sleep(SILENCE)
            raise

    def fail(self, problem: str, code: int) -> bool:
        """Tell the others that this process ends with `code`, and wait until they know.

        Returns whether the first process prints `problem`; its own it has printed.
        """
        if self.stopped.is_set():
            return False
        self.stopped.set()
        first = self.rank == 0
        try:
            word = problem if first else f"{self._named(self.rank)}: {problem}"
            self._leave_word(word, code, said=first)
            deadline = time.monotonic() + 3 * EVERY
            while self.store.add("ended", 0) < self.ranks - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            return self.store.check(["ended 0"])
        except (RuntimeError, OSError):
            return False

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
                slept = time.monotonic() - self.heard
                self.heard = time.monotonic()
                if slept > STOPPED:  # as the others may have been, by Ctrl-Z: listen anew
                    beats = [(number, self.heard) for number, _ in beats]
                self.store.add(f"beat {self.rank}", 1)
                if self.store.check([FAILED]):
                    return self._follow()
                for one in self.here:
                    if not is_alive(one.pid) and not self.store.check([FAILED]):
                        return self._end_without(one.rank, self.how_ended(one.rank) or GONE)
                now = time.monotonic()
                for other in range(self.ranks):
                    number = self.store.add(f"beat {other}", 0)
                    if number != beats[other][0]:
                        beats[other] = number, now
                    elif now - beats[other][1] > SILENCE:
                        return self._end_without(other, SILENT)
        except (RuntimeError, OSError):  # the store went with the first process
            self._end(self._lost(0, GONE), self.rank == 1)

    def _watch_store(self) -> None:
        """Notice that the first process stands still: then its store answers nobody."""
        looked = time.monotonic()
        while not self.stopped.wait(EVERY):
            slept, looked = time.monotonic() - looked, time.monotonic()
            if slept > STOPPED:
                self.heard = looked
            elif looked - self.heard > SILENCE:
                self._kill(0)
                self._end(self._lost(0, SILENT), self.rank == 1)

    def _follow(self) -> None:
        """End as another process does, which has left word why."""
        word = json.loads(self.store.get(FAILED).decode())
        says = not word["said"] and self.rank == word["sayer"]
        self.store.add(f"ended {self.rank}", 1)
        self.store.add("ended", 1)
        if not says:  # torchrun ends all as soon as one has ended
            time.sleep(EVERY)
        self._end(word["problem"], says, word["code"])

    def _end_without(self, other: int, what: str) -> None:
        """End all processes, since `other` is gone or stopped; on this machine it is killed."""
        self._kill(other)
        problem = self._lost(other, what)
        sayer = 1 if other == 0 else 0
        self._leave_word(problem, 1, said=False, sayer=sayer)
        if self.rank != sayer:  # who says it reads the word at its next beat
            time.sleep(1.5 * EVERY)
        self._end(problem, self.rank == sayer)

    def _leave_word(self, problem: str, code: int, said: bool, sayer: int = 0) -> None:
        word = {"problem": problem, "code": code, "said": said, "sayer": sayer}
        self.store.set(FAILED, json.dumps(word))

    def _kill(self, other: int) -> None:
        for one in self.here:
            if one.rank == other:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)

    def _named(self, other: int) -> str:
        one = self.processes[other]
        return f"process {other} of {self.ranks} (PID {one.pid} on {one.host})"

    def _lost(self, other: int, what: str) -> str:
        remedy = f"; {go_on()}" if os.environ.get(RUN_VARIABLE) else ""
        return f"{self._named(other)} {what}, and the run with it{remedy}"

    def _end(self, problem: str, says: bool, code: int = 1) -> None:
        if not self.stopped.is_set():
            self.stopped.set()
            self.give_up(problem, says, code)


def go_on() -> str:
    """How the run that this process belongs to goes on: from its newest checkpoint."""
    folder = Path(os.environ.get(RUN_VARIABLE) or "runs/NAME")
    if folder.is_dir() and not checkpoints(folder):  # another machine may not have the folder
        return "it has no checkpoint yet; start it anew"
    return f"{typed_command()} train resume={folder} goes on"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs, or is stopped; one that has ended and that nobody
    has waited for does not.
    """
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """The letter of a process's state, such as T for one that is stopped; empty where there is
    none. Where there is no /proc, R for one that exists.
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        return "R"
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
