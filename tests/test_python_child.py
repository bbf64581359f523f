"""Commands that start this package: for a shell as it is, and for a child."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PYTHONPATH, ROOT

ENVIRONMENT = os.environ | {"PYTHONPATH": PYTHONPATH}
PRINT_COMMAND = "from longctx.python_child import typed_command; print(typed_command())"
PARENT = """
import os, signal, subprocess, sys
from functools import partial
from longctx.python_child import end_with_parent
end = partial(end_with_parent, os.getpid(), signal.SIGTERM)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], preexec_fn=end)
print("started", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("first", [str(Path(sys.executable).parent), "/usr/bin"])
def test_typed_command_runs_in_the_users_shell(first: str, tmp_path: Path) -> None:
    for folder in (ROOT, tmp_path):
        shell = {"cwd": folder, "env": ENVIRONMENT | {"PATH": f"{first}:/usr/bin:/bin"}}
        ask = [sys.executable, "-c", PRINT_COMMAND]
        command = subprocess.check_output(ask, text=True, **shell).strip()
        subprocess.run(f"{command} watch --help", shell=True, check=True, **shell)


def test_child_ends_with_a_killed_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    # the output ends once both are gone
    parent = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    assert (parent.returncode, parent.stdout) == (-signal.SIGKILL, "started\n"), parent.stderr
