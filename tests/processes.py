"""What tests of several processes share: starting them and finding them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Of processes that a test starts: the repository before what the tests themselves were given.
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

FORKED = ROOT / "tests" / "ranks.py"
TOGETHER = ROOT / "tests" / "training" / "together.py"


def free_ports(count: int) -> list[int]:
    """Return as many ports that nobody listens on."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def run_on(ranks: int, script: Path, *arguments: object) -> None:
    """Run `script` with `arguments` on so many processes, one thread each; all must succeed."""
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    words = [str(ranks), str(script), *map(str, arguments)]
    done = finished(FORKED, words, ROOT, **shared, MASTER_PORT=free_ports(1)[0])
    assert done.returncode == 0, done.stderr[-8000:]


def train_together(ranks: int, commands: Sequence[Sequence[str]]) -> None:
    """Train each of `commands` on the same processes, one after another; all must succeed."""
    ports = free_ports(len(commands))
    run_on(ranks, TOGETHER, json.dumps(list(zip(ports, commands, strict=True))))


@contextmanager
def without_writes(folder: Path) -> Iterator[None]:
    """Mount `folder` again, read-only; skip the test if this process cannot."""
    bind = ["mount", "--bind", str(folder), str(folder)]
    if shutil.which("mount") is None or subprocess.run(bind, capture_output=True).returncode:
        pytest.skip("mounts a folder again, without writes; that takes root on Linux")
    subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def finished(
    script: Path | str,
    words: Sequence[str],
    cwd: Path,
    inside: Sequence[str] = (),
    input: str = "",
    **environment: object,
) -> subprocess.CompletedProcess[str]:
    """Run `script`, -c or -m with one thread to its end, after `inside`; `input` is its stdin."""
    own = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": 1} | environment
    command, piped = [*inside, sys.executable, str(script), *words], {"capture_output": True}
    env = os.environ | {name: str(value) for name, value in own.items()}
    return subprocess.run(command, cwd=cwd, env=env, input=input, text=True, **piped)


def install(*words: str) -> str:
    """Return what pip says to `words`, its requirements not those of constraints.txt; skip the test
    if it reaches no index that has them.
    """
    quiet = ["pip", "install", "-q", "--retries=1", "--no-compile", *words]
    done = finished("-m", quiet, ROOT, PIP_CONSTRAINT="")
    if "No matching distribution" in done.stderr:
        pytest.skip(f"pip reaches no index that has it: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def newest_version(package: str) -> str:
    """Return the newest version of a package in the index."""
    words = "--no-deps", "--dry-run", "--ignore-installed", "--report=-", package
    return str(json.loads(install(*words))["install"][0]["metadata"]["version"])


def killed_at(line: str, code: str, *arguments: object) -> None:
    """Run Python's `code` with `arguments`, and kill it as soon as it has printed `line`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert f"{line}\n" in process.stdout
        process.kill()
    assert process.wait() == -signal.SIGKILL


def children(pid: int) -> list[int]:
    """The processes that a process has started, from any of its threads."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = file.read_text().rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if int(fields.split()[1]) == pid:
            pids.append(int(name.split()[0]))
    return pids


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, children first."""
    below = children(pid)
    return below + [other for child in below for other in descendants(child)]


def state_of(pid: int) -> str:
    """Return the letter of a process's state, such as T if it is stopped; X if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    """Return True if a process runs, or is stopped; one that nobody has waited for does not."""
    return state_of(pid) not in "ZX"


def environment(pid: int) -> list[str]:
    """The NAME=value of a process; none where it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
