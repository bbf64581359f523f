"""Tracking: metrics.jsonl, the truth, and Weights & Biases, a copy.

A row of metrics.jsonl is a row at wandb, drawn over `tokens_seen`. wandb lives in a process of its
own (wandb_process.py), which follows metrics.jsonl. A thread would not do: at the end of a process
wandb waits without a limit for its core, and an end without that wait drops unfinished uploads.
"""

from __future__ import annotations

import json
import netrc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from longctx import python_child
from longctx.config.train_config import WandbConfig
from longctx.runs import metrics_file
from longctx.runs.metrics import Row
from longctx.runs.wandb_process import BEGUN, RUN_ID, offline_runs

# Names in .netrc: versions of `wandb login` wrote the one or the other.
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
# Seconds that the end of a run waits for wandb; 10 are promised.
PATIENCE = 9.0
# Seconds of them for a server without any answer; a copy offline takes the rest.
BEGINS = 4.0


class Tracker:
    """Append rows to metrics.jsonl in `folder`, which from `start_wandb` on are copied to wandb."""

    def __init__(self, folder: Path, config: WandbConfig) -> None:
        self.folder = folder
        self.config = config
        self.mode = wandb_mode(config)
        is_file = (folder / metrics_file.FILE).is_file()
        self._rows_before = len(metrics_file.read(folder)) if is_file else 0
        self._writer = metrics_file.Writer(folder)
        self._copy: Copy | None = None

    def log(self, row: Row) -> None:
        """Record one row, `step` and `tokens_seen` among its keys."""
        self._writer.write(row)
        if self._copy is not None:
            self._copy.check()

    def start_wandb(self, facts: dict[str, Any]) -> None:
        """Begin the copy at wandb, once, with `facts` as its configuration.

        Called after the first step, before which there is nothing to show.
        """
        if self.mode == "disabled" or self._copy is not None:
            return
        about: dict[str, Any] = {"kind": "run", "rows_before": self._rows_before}
        about |= {"facts": facts | {"commit": commit()}}
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
        why = "" if self.config.mode == "offline" or _has_key() else " (no API key)"
        lines = [f"{self.mode}{why}: {content} for {entity}/{self.config.project}"]
        folder = self.folder / "wandb"
        if self.mode == "offline":
            lines += [f"look: wandb leet {folder}", f"upload: wandb sync {folder}/offline-run-*"]
        elif why:
            lines.append("`wandb login` sets one; without it all is copied offline")
        if offline_runs(self.folder) or (self.mode == "offline" and (folder / RUN_ID).exists()):
            lines.append("several runs there: each start offline is a run of its own")
        return "wandb      " + "\n           ".join(lines)


class Copy:
    """A process that copies to wandb, with commands on its stdin and its own words on its stdout.

    Raises nothing: `news` has a line about a failure. After a failure a second process copies
    everything anew to a run offline.
    """

    def __init__(self, config: WandbConfig, folder: Path, mode: str, about: dict[str, Any]) -> None:
        self.folder = folder
        self.mode = mode
        self.attempts = 0
        self.request = about | {"config": vars(config), "folder": str(folder.absolute())}
        self.request |= {"argv": sys.argv, "commands": []}
        self.process: subprocess.Popen[bytes] | None = None
        self._news: str | None = None
        self._start()

    def send(self, command: dict[str, Any]) -> None:
        """Send one command: an upload, or the end."""
        self.request["commands"].append(command)
        self.check()
        if self.process is None or self.process.stdin is None:
            return
        # Errors are those of a process that has ended, or hangs with a full pipe.
        with suppress(OSError):
            os.write(self.process.stdin.fileno(), json.dumps(command).encode() + b"\n")

    def check(self) -> None:
        """Start a second process if the first one has failed."""
        if self.process is not None and self.process.poll() is not None:
            self._failed()

    def news(self) -> str | None:
        """Return what has gone wrong since the last call."""
        news, self._news = self._news, None
        return news

    def finish(self, exit_code: int) -> None:
        """Wait until everything is sent, for PATIENCE seconds at most."""
        deadline = time.monotonic() + PATIENCE
        self.send({"finish": exit_code})
        while self.process is not None:
            # A copy offline needs the rest of the time if the server never answers.
            remaining = deadline - time.monotonic()
            if self.mode == "online" and not self.begun():
                remaining -= PATIENCE - BEGINS
            with suppress(subprocess.TimeoutExpired):
                if self.process.wait(max(remaining, 0.0)) == 0:
                    return
            if self.process.returncode is not None:
                self._failed()
            elif self.mode == "online" and not self.begun():
                self._failed("gave no answer")
            elif time.monotonic() >= deadline:
                return self._leave()

    def _start(self) -> None:
        """Start the process, with the request in a file that it removes."""
        self.attempts += 1
        self.before = offline_runs(self.folder)
        try:
            descriptor, self.file = tempfile.mkstemp(prefix="longctx-wandb-")
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(self.request | {"mode": self.mode}, file, default=str)
            self.output = tempfile.TemporaryFile()  # noqa: SIM115 (read until this process ends)
            self.process = subprocess.Popen(
                python_child.command("longctx.runs.wandb_process", self.file),
                env=python_child.environment(),
                stdin=subprocess.PIPE,
                stdout=self.output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            return self._end(str(error))
        # A process that hangs must not hold up the run when its pipe is full.
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)

    def _failed(self, problem: str = "") -> None:
        """Start a second process, which copies offline, after the first one failed."""
        assert self.process is not None
        _kill(self.process)
        Path(self.file).unlink(missing_ok=True)
        lines = [line for line in self._output() if not line.startswith(BEGUN)]
        problem = problem or " ".join(lines)[:500]
        problem = problem or f"its process ended with code {self.process.returncode}"
        if self.attempts > 1:
            return self._end(problem)
        # The next copy has all rows of this one, so `wandb sync` must not find both.
        for leftover in offline_runs(self.folder) - self.before:
            shutil.rmtree(leftover, ignore_errors=True)
        self.mode = "offline"
        uploads = f"wandb sync {self.folder / 'wandb'}/offline-run-*"
        self._news = f"wandb      {problem}; all is copied offline; upload: {uploads}"
        self._start()

    def _leave(self) -> None:
        """Wait no longer for a process that still sends: it ends by itself."""
        self._news = self._news or (
            f"wandb      not all is sent after {PATIENCE:.0f} s; if it is not there later: "
            f"wandb sync {self.folder / 'wandb' / (self.begun() or 'offline-run-*')}"
        )

    def _end(self, problem: str) -> None:
        self.process = None
        file = self.folder / metrics_file.FILE
        rest = f"; {file} has every row" if file.exists() else ""
        self._news = f"wandb is off: {problem}{rest}"

    def _output(self) -> list[str]:
        # `pread` leaves the offset alone: the process shares it, and may still write.
        return os.pread(self.output.fileno(), 1 << 16, 0).decode("utf-8", "replace").splitlines()

    def begun(self) -> str:
        """Return the name of the run's folder at wandb; empty until the run has begun there."""
        names = (line.removeprefix(BEGUN) for line in self._output() if line.startswith(BEGUN))
        return next(names, "")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its own children, all in a session of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def log_evaluation(
    config: WandbConfig, folder: Path, content: dict[str, Any], picture: Path | None
) -> str:
    """Send an evaluation of the run in `folder` (its JSON, its PNG) to wandb and return the mode of
    the copy. Raises RuntimeError, one line, if it failed.

    It is a run of its own, of job type eval and in the group of the run; its files are in eval/.
    """
    shown = None if picture is None else str(picture.absolute())
    about = {"kind": "eval", "run": folder.name, "content": content, "picture": shown}
    copy = Copy(config, folder / "eval", wandb_mode(config), about)
    copy.finish(0)
    if problem := copy.news():
        raise RuntimeError(problem)
    return copy.mode


def commit() -> str | None:
    """Return the commit of the checkout that holds this code, `-dirty` if it was changed since;
    None outside of a checkout.
    """
    folder = str(Path(__file__).parent)
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(
            ["git", "-C", folder, *describe], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
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
