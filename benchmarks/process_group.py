"""The processes that a benchmark starts: a command that leaves none behind, a run of train.py, a
function in a process of its own.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, Self, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]


class ProcessGroup:
    """A command in a process group of its own, which goes with all its processes at the end.

    Its output, stderr with it, goes to `output`, a file or subprocess.PIPE.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], output: IO[Any] | int
    ) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        gone_by = time.monotonic() + 30  # a killed process gives back its memory before it is gone
        while time.monotonic() < gone_by and group(self.process.pid):
            time.sleep(0.1)


def group(pgid: int) -> list[int]:
    """The processes of a group, those left out that only wait for their parent to notice."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            state, _, its = path.read_text().rpartition(")")[2].split()[:3]
            if int(its) == pgid and state not in "ZX":
                pids.append(int(path.parent.name))
    return pids


def in_child(function: Callable[..., T], *arguments: Any) -> T:
    """Return function(*arguments), called in a new process: compiled code of earlier points keeps
    memory of theirs, and Liger changes transformers.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def train(overrides: list[str], may_fail: bool = False) -> int:
    """Run train.py with `overrides`, after printing the command; return its exit code.

    ValueError if it fails, unless it `may_fail`: then only for a mistake and Ctrl-C.
    """
    print(f"\n$ python train.py {shlex.join(overrides)}", flush=True)
    code = subprocess.run([sys.executable, str(ROOT / "train.py"), *overrides]).returncode
    if code in (2, 130) or (code and not may_fail):
        raise ValueError(f"a run ended with exit code {code}, see above")
    return code
