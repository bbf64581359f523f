"""The process of a command and its children. Torch-free.

It has the handlers of signals, the exit codes, and the command lines of child processes.

SIGINT is Ctrl-C, SIGTERM `kill` and preemption, SIGHUP a lost terminal. SLURM sends SIGUSR1 before
the time limit (`--signal=USR1@60`). The exit code is 128 + the number, as in a shell.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

STARTED_VARIABLE = "LONGCTX_STARTED"  # PID:folder of their supervisor, for ranks of devices=N
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
IGNORABLE = (signal.SIGHUP, signal.SIGUSR1)  # by who starts a command, as nohup does
EXIT_CODES = tuple(128 + number for number in SIGNALS)
TOGETHER = 0.5  # seconds for which a signal counts once: launchers send a group's again


@dataclass
class StopSignal:
    """The signal that has reached this command, if any; it raises KeyboardInterrupt.

    If `waits` is set the first does not: the run asks for `number` after each step. A second one
    raises then. A signal that comes while the command ends for one ends the process at once.
    """

    number: int | None = None
    speaks: bool = True  # rank 0 does
    waits: bool = False
    has_raised: bool = False
    latest: float = -TOGETHER
    process: int = field(default_factory=os.getpid)

    @property
    def code(self) -> int:
        """Return the exit code of a command that it has ended."""
        return 128 + (self.number or signal.SIGINT)

    @property
    def name(self) -> str:
        """Return its name, such as SIGTERM."""
        return signal.Signals(self.number or signal.SIGINT).name

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Take a signal, as its handler."""
        if os.getpid() != self.process:  # a child that was forked
            os._exit(128 + number)
        before, self.latest = self.latest, time.monotonic()
        if self.latest - before <= TOGETHER:
            return
        if self.has_raised:
            exit_at_once(number, frame)
        saves = self.waits and self.number is None
        self.number = self.number or number
        if self.waits and self.speaks:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            step = f"finishing this step, then saving; {name} again quits unsaved"
            # At once: a print may be under way when a handler is called
            os.write(2, f"\n{name}: {step if saves else 'quitting, unsaved'}\n".encode())
        if not saves:
            self.has_raised = True
            raise KeyboardInterrupt


_current: StopSignal | None = None


def check() -> None:
    """Raise KeyboardInterrupt if a signal has come inside `caught` that does not wait."""
    # Python drops the exception of a handler if a callback runs, as in the import system
    if _current is not None and _current.number is not None and not _current.waits:
        raise KeyboardInterrupt


@contextmanager
def caught() -> Iterator[StopSignal]:
    """Catch the signals inside the outermost of these blocks; only the main thread can."""
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield (stop := _current or StopSignal())
        stop.waits = False  # if the caller goes on, as the demo does, no step asks for a signal
        return
    _current, hook = StopSignal(), sys.unraisablehook

    def without_signals(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):  # see `check`
            hook(unraisable)

    sys.unraisablehook = without_signals
    taken = set(SIGNALS) - {x for x in IGNORABLE if signal.getsignal(x) is signal.SIG_IGN}
    before = {number: signal.signal(number, _current.on_signal) for number in taken}
    try:
        yield _current
    finally:
        _current, sys.unraisablehook = None, hook
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def libraries() -> Iterator[None]:
    """Import large libraries in this block, and tell a terminal that they load."""
    if "torch" not in sys.modules and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print("loading torch ...", file=sys.stderr, flush=True)
    # Looking for garbage again and again is a fifth of the time that importing torch takes
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    # Libraries stay, so later collections need not look at them
    gc.freeze()
    check()


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End this process, which has nothing to save, as the handler of a signal."""
    # Rank 0 says so for the ranks of a supervisor
    if STARTED_VARIABLE not in os.environ or os.environ.get("RANK") == "0":
        os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


def let_segments_grow() -> None:
    """Let torch's allocator of GPU memory extend a segment, unless the user has configured it."""
    # With segments of fixed size, steps of 8 billion parameters that fitted a card ran out of
    # memory with a fifth of it in gaps (docs/cards.md). torch reads this at its first allocation.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def catch_first() -> None:
    """Give signals their exit code, and find the packages, before the command line is imported."""
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_at_once)
    if not all(map(find_spec, ("torch", "yaml", "huggingface_hub"))):
        remedy = "`make train` sets .venv up, and `source .venv/bin/activate` enters it"
        print(f"error: {sys.executable} lacks packages of longctx; {remedy}", file=sys.stderr)
        sys.exit(2)


def exit_with(code: int) -> NoReturn:
    """End this process with `code` once it is done. It ignores signals meanwhile."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # The interpreter's own end takes a second to free torch, waits for compiling threads, and ends
    # threads of C++ that ask for its lock, such as gloo's: "terminate called without an active
    # exception" (https://github.com/pytorch/pytorch/issues/38228)
    os._exit(code)


def exit_within(seconds: float, code: int) -> None:
    """End this process after `seconds` if something holds its exit up, such as NCCL or wandb."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def python_command(module: str, *arguments: str) -> list[str]:
    """Return `python -m module arguments`; modules of the current folder are not imported."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with `variables`; the child finds this package first."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | variables


def typed_command() -> str:
    """Return the command that starts longctx in the user's shell, from the current folder: without
    an activated environment the shell finds no `longctx`, or another one.
    """
    own = shutil.which("longctx") == str(Path(sys.executable).parent / "longctx")
    return "longctx" if own else f"{shlex.quote(sys.executable)} -m longctx"


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send this process `number` when its parent ends, even by kill -9."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, number)  # 1: PR_SET_PDEATHSIG of linux/prctl.h
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), number)
