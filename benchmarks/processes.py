"""The processes of a benchmark: a command that leaves none, a function in one of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]


def ran(
    command: list[str], seconds: float, folder: Path = ROOT
) -> tuple[int | None, list[str], list[str]]:
    """Run a command in `folder`, in a process group, all of which ends after `seconds`; return its
    exit code, None if it took longer, and the lines of its output and of its errors.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
        process = subprocess.Popen(command, cwd=folder, start_new_session=True, **files)
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for file in (output, errors):
            file.seek(0)
        return code, output.read().splitlines(), errors.read().splitlines()


def finished(command: list[str], seconds: float, folder: Path = ROOT) -> str | None:
    """Return None if a command ends well, else its last line that tells of an error; see `ran`."""
    code, output, problems = ran(command, seconds, folder)
    if code is None:
        return f"took longer than {seconds:.0f} s"
    lines = [line.strip() for line in [*output, *problems] if line.strip()]
    # torchrun adds its own error after those of the ranks
    errors = [line for line in lines if "rror: " in line and "ChildFailed" not in line]
    return None if code == 0 else (errors or lines or [f"exit code {code}"])[-1][:300]


def asked(module: str, request: dict[str, Any], gpus: int, seconds: float) -> dict[str, Any] | str:
    """Return the JSON that `python -m module REQUEST OUT` writes to OUT, on `gpus` processes; one
    line if it writes none.
    """
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m"]
    with tempfile.TemporaryDirectory() as scratch:
        file, out = Path(scratch, "request.json"), Path(scratch, "out.json")
        file.write_text(json.dumps(request))
        inside = [*(launcher if gpus > 1 else []), module, str(file), str(out)]
        problem = finished([sys.executable, "-m", *inside], seconds)
        if not out.exists():
            return problem or "wrote nothing"
        answer: dict[str, Any] = json.loads(out.read_text())
        return answer


def in_child(function: Callable[..., T], *arguments: Any, seconds: float | None = None) -> T:
    """Return function(*arguments), called in a new process, which ends after `seconds`: compiled
    code of earlier points keeps memory of theirs.

    Raises what the function raises, and RuntimeError if the process ends without an answer.
    """
    spawned = get_context("spawn")
    receiver, sender = spawned.Pipe(duplex=False)
    child = spawned.Process(target=_answer, args=(sender, function, arguments))
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise RuntimeError(f"took longer than {seconds:.0f} s")
        answer: T | Exception = receiver.recv()
        child.join(20)  # its workers end with it
    except EOFError:  # the kernel kills a process if the machine has no memory left
        raise RuntimeError("the process was killed") from None
    finally:
        child.kill()
        child.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # A spawned process would spawn its data workers too, which import torch for seconds
    set_start_method(None, force=True)
    try:
        sender.send(function(*arguments))
    except Exception as error:
        sender.send(RuntimeError(f"{type(error).__name__}: {error}"))
