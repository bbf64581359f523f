"""Tracking: metrics.jsonl, the truth, and its copies by `tracker=`.

A row of metrics.jsonl is a row at wandb, drawn over `tokens_seen`. Each tracker lives in a process
of its own (tracker_process.py), which follows metrics.jsonl: a tracker that fails or hangs stops
neither the run nor the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longctx import system
from longctx.config.doors import TRACKERS
from longctx.config.train_config import WandbConfig
from longctx.runs import metrics_file
from longctx.runs.metrics import Row
from longctx.runs.wandb_copy import offline_runs, wandb_mode

PATIENCE = 9.0  # seconds that the end of a run waits for copies; 10 are promised


class Tracker:
    """Append rows to metrics.jsonl in `folder`; from `start_copies` on, `names` get copies."""

    def __init__(
        self,
        folder: Path,
        config: WandbConfig,
        names: Sequence[str] = ("wandb",),
        plugins: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.config = config
        self.plugins = plugins  # which may have registered trackers
        openings = {name: TRACKERS[name].opening(config, folder) for name in names}
        self.openings = {name: lines for name, lines in openings.items() if lines}
        self._rows_before = len(metrics_file.read(folder))
        self._writer = metrics_file.Writer(folder)
        self._copies: list[Copy] = []

    def log(self, row: Row) -> None:
        """Record one row, `step` and `tokens_seen` among its keys."""
        self._writer.write(row)

    def start_copies(self, metadata: dict[str, Any]) -> None:
        """Begin the copies, once, with `metadata` as the configuration that they show.

        Called after the first step, before which there is nothing to show.
        """
        if not self.openings or self._copies:
            return
        about = {
            "rows_before": self._rows_before,
            "metadata": metadata | {"commit": commit()},
            "plugins": self.plugins,
        }
        self._copies = [Copy(name, self.config, self.folder, about) for name in self.openings]

    def checkpoint(self, path: Path, step: int) -> None:
        """Upload a checkpoint, with wandb.artifacts=true."""
        for copy in self._copies:
            if self.config.artifacts and copy.process is not None:
                copy.send({"checkpoint": str(path.absolute()), "step": step})

    def problem(self) -> str | None:
        """Return lines about copies that failed, once."""
        return "\n".join(filter(None, [copy.news() for copy in self._copies])) or None

    def finish(self, exit_code: int) -> None:
        """Close the file, and the copies once they have everything, or after PATIENCE seconds."""
        self._writer.close()
        finish(self._copies, exit_code)

    def opening(self) -> str | None:
        """Return lines that show the user the targets of the copies, or None without any."""
        heads = [f"{name:<10} " + f"\n{'':11}".join(x) for name, x in self.openings.items()]
        return "\n".join(heads) or None


class Copy:
    """A process that copies to the tracker `name`.

    It follows a file of commands and writes its news to another. Raises nothing: `news` has a line
    about a failure.
    """

    def __init__(self, name: str, config: WandbConfig, folder: Path, about: dict[str, Any]) -> None:
        self.name, self.folder = name, folder
        self.process: subprocess.Popen[bytes] | None = None
        self._news: list[str] = []
        self._news_read, self._sent = 0, 0
        request = about | {
            "config": vars(config),
            "folder": str(folder.absolute()),
            "argv": sys.argv,
            "parent": os.getpid(),
            "earlier": [path.name for path in offline_runs(folder)],
        }
        try:
            # Files instead of pipes: a process that hangs must not hold up the run
            self._commands = tempfile.TemporaryFile()  # noqa: SIM115 (open while the copy lives)
            self._output = tempfile.TemporaryFile()  # noqa: SIM115
            self.send(request)
            self.process = subprocess.Popen(
                system.python_command("longctx.runs.tracker_process", name),
                env=system.child_environment(),
                stdin=self._commands,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._news = [f"{name} is off: {error}; metrics.jsonl has every row"]

    def send(self, command: dict[str, Any]) -> None:
        """Append one command: the request, an upload, or the end."""
        line = json.dumps(command, default=str).encode() + b"\n"
        # The process shares the offsets of both files, so neither side moves them
        with suppress(OSError):  # the disk of temporary files is full
            self._sent += os.pwrite(self._commands.fileno(), line, self._sent)

    def news(self) -> str | None:
        """Return what has gone wrong since the last call."""
        news, self._news = self._news, []
        if self.process is not None:
            # Before its words are read: a process that ends in between has written all of them
            code = self.process.poll()
            new = os.pread(self._output.fileno(), 1 << 16, self._news_read)
            self._news_read += len(new)
            news += new.decode("utf-8", "replace").splitlines()
            if code is not None:
                self.process = None
            if code and not news:
                news.append(f"{self.name} is off: its process ended with code {code}")
        return "\n".join(news) or None

    def wait(self, seconds: float) -> None:
        """Wait for the process, `seconds` at most."""
        if self.process is None:
            return
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = TRACKERS[self.name].late.format(folder=self.folder)
            later = f"; if it is not there later: {late}" if late else ""
            line = f"not all is sent after {PATIENCE:.0f} s, the rest follows{later}"
            self._news.append(f"{self.name:<10} {line}")


def finish(copies: Sequence[Copy], exit_code: int) -> None:
    """Wait until the copies have everything, for PATIENCE seconds at most together."""
    for copy in copies:
        if copy.process is not None:
            copy.send({"finish": exit_code})
    deadline = time.monotonic() + PATIENCE
    for copy in copies:
        copy.wait(max(0.0, deadline - time.monotonic()))


def log_evaluation(
    config: WandbConfig, folder: Path, content: dict[str, Any], picture: Path | None
) -> str:
    """Send an evaluation of the run in `folder` (its JSON, its PNG) to wandb and return the mode of
    the copy. Raises RuntimeError, one line, if it failed.

    It is a run of its own, of job type eval and in the group of the run; its files are in eval/.
    """
    shown = None if picture is None else str(picture.absolute())
    about = {"run": folder.name, "content": content, "picture": shown}
    copy = Copy("wandb", config, folder / "eval", about)
    finish([copy], 0)
    if problem := copy.news():
        raise RuntimeError(problem)
    return wandb_mode(config)


def commit() -> str | None:
    """Return the commit of the checkout that holds this code, `-dirty` if it was changed since;
    None outside of a checkout.
    """
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "-C", str(Path(__file__).parent), *describe]
    try:
        return subprocess.check_output(
            command, text=True, timeout=10, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None
