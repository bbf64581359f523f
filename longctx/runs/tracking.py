"""Tracking: metrics.jsonl, the truth, and Weights & Biases, a copy.

A row of metrics.jsonl is a row at wandb, drawn over `tokens_seen`. wandb lives in a process of its
own (wandb_process.py), which follows metrics.jsonl. A thread would not do: at the end of a process
wandb waits without a limit for its core, and an end without that wait drops unfinished uploads.
"""

from __future__ import annotations

import json
import netrc
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from longctx import system
from longctx.config.train_config import WandbConfig
from longctx.runs import metrics_file
from longctx.runs.metrics import Row
from longctx.runs.wandb_process import offline_runs

HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # names that `wandb login` writes to .netrc
PATIENCE = 9.0  # seconds that the end of a run waits for wandb; 10 are promised


class Tracker:
    """Append rows to metrics.jsonl in `folder`, which from `start_wandb` on are copied to wandb."""

    def __init__(self, folder: Path, config: WandbConfig) -> None:
        self.folder = folder
        self.config = config
        self.mode = wandb_mode(config)
        self._rows_before = len(metrics_file.read(folder))
        self._writer = metrics_file.Writer(folder)
        self._copy: Copy | None = None

    def log(self, row: Row) -> None:
        """Record one row, `step` and `tokens_seen` among its keys."""
        self._writer.write(row)

    def start_wandb(self, facts: dict[str, Any]) -> None:
        """Begin the copy at wandb, once, with `facts` as its configuration.

        Called after the first step, before which there is nothing to show.
        """
        if self.mode == "disabled" or self._copy is not None:
            return
        about = {"rows_before": self._rows_before, "facts": facts | {"commit": commit()}}
        self._copy = Copy(self.config, self.folder, self.mode, about)

    def checkpoint(self, path: Path, step: int) -> None:
        """Upload a checkpoint, with wandb.artifacts=true."""
        if self._copy is not None and self.config.artifacts:
            self._copy.send({"checkpoint": str(path.absolute()), "step": step})

    def problem(self) -> str | None:
        """Return a line about a copy that failed, once."""
        return None if self._copy is None else self._copy.news()

    def finish(self, exit_code: int) -> None:
        """Close the file, and wandb once it has everything, or after PATIENCE seconds."""
        self._writer.close()
        if self._copy is not None:
            self._copy.finish(exit_code)

    def opening(self) -> str | None:
        """Return lines that show the user the target of the copy, or None without a copy.

        The config.yaml of a resumed run may have decided it.
        """
        if self.mode == "disabled":
            return None
        entity = self.config.entity or os.environ.get("WANDB_ENTITY") or "your default entity"
        content = "rows and checkpoints" if self.config.artifacts else "rows"
        lines = [f"{self.mode}: {content} for {entity}/{self.config.project}"]
        if self.config.mode != "offline" and not _has_key():
            lines.append("no API key, which `wandb login` sets: all is copied offline")
        if self.mode == "offline":
            folder = self.folder / "wandb"
            lines += [f"look: wandb leet {folder}", f"upload: wandb sync {folder}/offline-run-*"]
        return "wandb      " + "\n           ".join(lines)


class Copy:
    """A process that copies to wandb. It follows a file of commands and writes its news to another.

    Raises nothing: `news` has a line about a failure.
    """

    def __init__(self, config: WandbConfig, folder: Path, mode: str, about: dict[str, Any]) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._news: list[str] = []
        self._news_read, self._sent = 0, 0
        request = about | {
            "config": vars(config),
            "folder": str(folder.absolute()),
            "mode": mode,
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
                system.python_command("longctx.runs.wandb_process"),
                env=system.child_environment(),
                stdin=self._commands,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._news = [f"wandb is off: {error}; metrics.jsonl has every row"]

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
                news.append(f"wandb is off: its process ended with code {code}")
        return "\n".join(news) or None

    def finish(self, exit_code: int) -> None:
        """Wait until everything is sent, for PATIENCE seconds at most."""
        if self.process is None:
            return
        self.send({"finish": exit_code})
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._news.append(
                f"wandb      not all is sent after {PATIENCE:.0f} s, the rest follows; if it is "
                f"not there later: wandb sync {self.folder / 'wandb'}/*run-*"
            )


def log_evaluation(
    config: WandbConfig, folder: Path, content: dict[str, Any], picture: Path | None
) -> str:
    """Send an evaluation of the run in `folder` (its JSON, its PNG) to wandb and return the mode of
    the copy. Raises RuntimeError, one line, if it failed.

    It is a run of its own, of job type eval and in the group of the run; its files are in eval/.
    """
    mode = wandb_mode(config)
    shown = None if picture is None else str(picture.absolute())
    about = {"run": folder.name, "content": content, "picture": shown}
    copy = Copy(config, folder / "eval", mode, about)
    copy.finish(0)
    if problem := copy.news():
        raise RuntimeError(problem)
    return mode


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


def wandb_mode(config: WandbConfig) -> str:
    """Return online, offline or disabled: as configured, else by WANDB_MODE, else by whether there
    is an API key.
    """
    mode = config.mode if config.mode != "auto" else os.environ.get("WANDB_MODE", "auto")
    if mode in ("disabled", "offline", "online"):
        return mode
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    """Return True if wandb would find an API key, in the environment or in .netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        logins = netrc.netrc(file)
    except (OSError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(name) is not None for name in ([host] if host else HOSTS))
