"""Signals before and after a run has something to save, exits, children, and waiting threads."""

import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx import system
from tests.processes import PYTHONPATH, ROOT, finished


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_waits_for_the_step_second_quits(number, capfd, monkeypatch):
    monkeypatch.setattr(system, "TOGETHER", -1.0)
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    with system.caught() as stop:
        stop.waits = True
        signal.raise_signal(number)
        printed = capfd.readouterr().err
        assert f"{name}: finishing this step, then saving; {name} again quits unsaved" in printed
        assert (stop.number, stop.has_raised) == (number, False)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert f"{name}: quitting, unsaved" in capfd.readouterr().err


def test_other_ranks_print_nothing_about_a_signal(capfd):
    with system.caught() as stop, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    with system.caught() as stop:
        stop.speaks = False
        stop.waits = True
        signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    assert capfd.readouterr().err == ""


class Leaves:
    """An object for a weak reference."""


def test_a_signal_in_a_callback_ends_the_command(monkeypatch):
    """Python drops what is raised there, and prints its traceback."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: printed.append(one.exc_type))
    with system.caught() as stop:
        x = Leaves()
        _weak = weakref.ref(x, lambda _: signal.raise_signal(signal.SIGUSR1))
        del x
        assert stop.number == signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):
            system.check()
        x = Leaves()
        _weak = weakref.ref(x, lambda _: 1 / 0)
        del x
    assert printed == [ZeroDivisionError]
    system.check()


ENDING = """
import atexit, threading, torch
from concurrent.futures import ThreadPoolExecutor
from longctx import system

def compute():
    while True:
        torch.ones(9) + 1

atexit.register(print, "left")
pool = ThreadPoolExecutor(2)
begun = [pool.submit(task) for task in (compute, threading.Event().wait)]
system.exit_with(7)
"""


def test_exit_keeps_its_code_beside_busy_compilers():
    done = finished("-c", [ENDING], ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (7, "left\n", "")


PRINT_COMMAND = "from longctx.system import typed_command; print(typed_command())"
PARENT = """
import os, signal, subprocess, sys
from functools import partial
from longctx.system import end_with_parent
end = partial(end_with_parent, os.getpid(), signal.SIGTERM)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], preexec_fn=end)
print("started", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("first", [str(Path(sys.executable).parent), "/usr/bin"])
def test_typed_command_runs_in_the_users_shell(first, tmp_path):
    for folder in (ROOT, tmp_path):
        paths = {"PYTHONPATH": PYTHONPATH, "PATH": f"{first}:/usr/bin:/bin"}
        shell = {"cwd": folder, "env": os.environ | paths}
        ask = [sys.executable, "-c", PRINT_COMMAND]
        command = subprocess.check_output(ask, text=True, **shell).strip()
        subprocess.run(f"{command} compare --help", shell=True, check=True, **shell)


def test_child_ends_with_a_killed_parent():
    parent = finished("-c", [PARENT], ROOT)  # its output ends once both are gone
    assert (parent.returncode, parent.stdout) == (-signal.SIGKILL, "started\n"), parent.stderr


def spins(module: str, **environment: str) -> str:
    """Return how long OpenMP's threads spin after an import of `module`, in OpenMP's own words."""
    libraries = list(Path(torch.__file__).parent.glob("lib/libgomp*"))
    if not libraries:
        pytest.skip("torch's OpenMP is not GNU's")
    # Torch loads it too, but takes a second for the rest of itself
    code = f"import {module}, ctypes; ctypes.CDLL({str(libraries[0])!r})"
    done = finished("-c", [code], ROOT, OMP_DISPLAY_ENV="verbose", **environment)
    assert done.returncode == 0, done.stderr
    return done.stderr.partition("GOMP_SPINCOUNT = '")[2].partition("'")[0]


def test_threads_of_openmp_spin_briefly_unless_set(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for module in ("eval", "longctx.model"):
        assert spins(module) == "1000"
    assert spins("longctx", GOMP_SPINCOUNT="7") == "7"
    assert spins("longctx", OMP_WAIT_POLICY="ACTIVE") not in ("1000", "7")
