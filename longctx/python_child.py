"""Commands that run this package in a child process, from any folder, installed or not."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import sys
from pathlib import Path


def command(module: str, *arguments: str) -> list[str]:
    """Return `python -m module arguments`; modules of the current folder are not imported."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with `variables`; the child finds this package first."""
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
    """Return a path as short as it can be typed from the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send this process `number` when its parent ends, even by kill -9."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), number)
