"""One evaluation on several devices: the same command once per device, document i on device i mod
devices.

The command that the user types is the first of them and puts the parts together; the others write
their part to a file that it names in the environment. They share nothing else, so it does not
matter that one is slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PART_VARIABLE = "LONGCTX_PART"  # number and file of a process that another one started


def part() -> tuple[int, Path | None]:
    """This process's number, from 0, and where it leaves its part; the first one leaves none."""
    number, _, file = os.environ.get(PART_VARIABLE, "").partition(":")
    return (int(number), Path(file)) if file else (0, None)


class Others:
    """The processes 1 .. devices - 1 of an evaluation."""

    def __init__(self, command: Sequence[str], devices: int, folder: Path) -> None:
        self.files = [folder / f"{number}.json" for number in range(1, devices)]
        self.said = [folder / f"{number}.txt" for number in range(1, devices)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for number, (file, said) in enumerate(zip(self.files, self.said, strict=True), start=1):
            env = os.environ | {PART_VARIABLE: f"{number}:{file}"}
            with open(said, "wb") as errors:
                self.processes.append(
                    subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)
                )

    def parts(self) -> list[dict[str, Any]]:
        """What they found, once all have ended; ValueError with what the first that failed said."""
        for number, process in enumerate(self.processes, start=1):
            if code := process.wait():
                lines = self.said[number - 1].read_text(errors="replace").strip().splitlines() or [
                    f"exit code {code}"
                ]
                raise ValueError(
                    f"devices={len(self.processes) + 1}: process {number}: {lines[-1]}"
                )
        return [json.loads(file.read_text()) for file in self.files]

    def stop(self) -> None:
        """End those that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                process.wait()


@contextmanager
def others(script: str, words: Sequence[str], devices: int) -> Iterator[Others]:
    """`python script words` on every device but the first; ended with the block at the latest."""
    with tempfile.TemporaryDirectory(prefix="longctx-") as folder:
        started = Others([sys.executable, os.path.abspath(script), *words], devices, Path(folder))
        try:
            yield started
        finally:
            started.stop()
