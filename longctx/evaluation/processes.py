"""One evaluation on several devices: the same command once per device, which scores every n-th
document.

The process that the user starts is the first of them and puts the parts together. The others write
their part to a file that the first one names in their environment. They share nothing else, so a
slow one delays no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longctx import python_child

PART_VARIABLE = "LONGCTX_PART"  # number and file of a process that another one started


def part() -> tuple[int, Path | None]:
    """This process's number, from 0, and where it leaves its part; the first one leaves none."""
    number, _, file = os.environ.get(PART_VARIABLE, "").partition(":")
    return (int(number), Path(file)) if file else (0, None)


class Others:
    """The processes 1 .. devices - 1 of an evaluation."""

    def __init__(self, overrides: Sequence[str], devices: int, folder: Path) -> None:
        command = python_child.command("longctx", "eval", *overrides)
        numbers = range(1, devices)
        self.files = [folder / f"{number}.json" for number in numbers]
        self.logs = [folder / f"{number}.txt" for number in numbers]
        self.processes: list[subprocess.Popen[bytes]] = []
        for number, file, log in zip(numbers, self.files, self.logs, strict=True):
            env = python_child.environment(**{PART_VARIABLE: f"{number}:{file}"})
            with open(log, "wb") as errors:
                self.processes.append(
                    subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)
                )

    def parts(self) -> list[dict[str, Any]]:
        """Their parts, once all have ended; ValueError with the last line of the first that
        failed.
        """
        for number, (process, log) in enumerate(zip(self.processes, self.logs, strict=True), 1):
            if code := process.wait():
                lines = log.read_text(errors="replace").strip().splitlines()
                message = lines[-1] if lines else f"exit code {code}"
                raise ValueError(f"devices={len(self.processes) + 1}: process {number}: {message}")
        return [json.loads(file.read_text()) for file in self.files]

    def stop(self) -> None:
        """End those that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                process.wait()


@contextmanager
def others(overrides: Sequence[str], devices: int) -> Iterator[Others]:
    """`longctx eval` with `overrides` on every device but the first; the processes end with the
    block at the latest.
    """
    with tempfile.TemporaryDirectory(prefix="longctx-") as folder:
        started = Others(overrides, devices, Path(folder))
        try:
            yield started
        finally:
            started.stop()
