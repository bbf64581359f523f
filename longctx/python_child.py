"""Commands that run this package in a child process, from any folder, installed or not."""

from __future__ import annotations

import ctypes
import os
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def command(module: str, *arguments: str) -> list[str]:
    """`python -m module arguments`, without the current folder among the places of modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with `variables`, in which the child finds this package first."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | variables


def typed_command() -> str:
    """Return the command that starts longctx in the user's shell, from the current folder: without
    an activated environment the shell finds no `longctx`, or another one.
    """
    script = Path(sys.executable).parent / "longctx"
    if not script.exists():  # a checkout that is not installed
        return f"{shlex.quote(_shown(Path(sys.executable)))} -m longctx"
    found = shutil.which("longctx")
    is_found = found is not None and os.path.samefile(found, script)
    return "longctx" if is_found else shlex.quote(_shown(script))


def _shown(path: Path) -> str:
    """A path as short as it can be typed from the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send this process `number` when its parent ends, even by kill -9."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), number)


def limit_memory(more: int) -> None:
    """Let this process take `more` bytes beyond those of now, and leave no core file."""
    pages = Path("/proc/self/statm")
    used = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class TimeLimit:
    """The processor time that is left to this process, which SIGPROF ends where it runs out: a
    leaky bucket of `seconds`, filled again by what is earned. `wait` bounds each piece of work in
    seconds of a clock.
    """

    def __init__(self, seconds: float, wait: int) -> None:
        self.most = self.left = seconds
        self.wait = wait

    def run(self, work: Callable[[], Result], earned: float) -> Result:
        """work(), after which `earned` seconds are put back."""
        signal.setitimer(signal.ITIMER_PROF, self.left)
        signal.alarm(self.wait)
        try:
            return work()
        finally:
            signal.alarm(0)
            left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
            self.left = min(self.most, left + earned)
