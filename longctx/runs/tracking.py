"""Tracking: metrics.jsonl, the truth, and Weights & Biases, a copy.

A row of metrics.jsonl is a row at wandb, drawn over `tokens_seen`. A table or plot is sent with the
row that it shows. wandb lives in a process of its own (wandb_process.py), which reads from a file
what it is to send, so that nothing it does can hold or end a run: a process that fails is followed
by one that writes all of it anew offline.
"""

from __future__ import annotations

import json
import math
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
from longctx.runs.wandb_process import (
    BEGUN,
    PROBLEM,
    RUN_ID,
    SENT,
    offline_runs,
    positions,
    samples,
)

HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # in .netrc: `wandb login` wrote either
PATIENCE = 9.0  # seconds that the end of a run waits for wandb
BEGINS = 4.0  # of them, for a server that has not even answered: the rest is for a copy offline


class Tracker:
    """Appends rows to metrics.jsonl in `folder` and, from `start_wandb` on, has the same rows sent
    to wandb.
    """

    def __init__(self, folder: Path, config: WandbConfig) -> None:
        self.folder, self.config = folder, config
        self.mode = wandb_mode(config)
        path = folder / "metrics.jsonl"
        earlier = metrics_file.read(folder) if path.is_file() else []
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (`finish` closes it)
        self._positions = [point for row in earlier for point in positions(row)]
        self._samples = [one for row in earlier for one in samples(row)]
        self._waiting: list[dict[str, Any]] = []
        self._copy: Copy | None = None

    def log(self, row: Row) -> None:
        """Record one row, `step` and `tokens_seen` among its keys; null in the file stands for what
        is no finite number.
        """
        finite = {
            key: None if isinstance(x, float) and not math.isfinite(x) else x
            for key, x in row.items()
        }
        try:
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self._file.name}: cannot be written: {error.strerror}") from error
        if self._copy is not None:
            self._copy.send({"row": row})
        elif self.mode != "disabled":
            self._waiting.append({"row": row})

    def start_wandb(self, facts: dict[str, Any]) -> None:
        """Begin the copy at wandb, configured as `facts`, once.

        Called after the first step, before which it has nothing to show.
        """
        if self.mode == "disabled" or self._copy is not None:
            return
        about: dict[str, Any] = {"kind": "run", "facts": facts | {"commit": commit()}}
        about |= {"positions": self._positions, "samples": self._samples}
        self._copy = Copy(self.config, self.folder, self.mode, about)
        for message in self._waiting:
            self._copy.send(message)
        self._waiting.clear()

    def checkpoint(self, path: Path, step: int) -> None:
        """Upload a checkpoint, with wandb.artifacts=true."""
        if self._copy is not None and self.config.artifacts:
            self._copy.send({"checkpoint": str(path.absolute()), "step": step})

    def problem(self) -> str | None:
        """What has become of the copy, where it failed; said once."""
        return None if self._copy is None else self._copy.news()

    def finish(self, exit_code: int) -> None:
        """Close the file, and wandb once it has everything, or after PATIENCE seconds."""
        with suppress(OSError):  # `log` has raised it already
            self._file.close()
        if self._copy is not None:
            self._copy.finish(exit_code)

    def opening(self) -> str | None:
        """Return the lines that say where the rows go, which the config.yaml of a resumed run may
        have decided; None if they go nowhere else.
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
    """What is sent to wandb, in a file that a process of its own follows.

    Raises nothing: what goes wrong is `news`. A process that fails is followed by a second one,
    which sends the file from its beginning to a run offline.
    """

    def __init__(self, config: WandbConfig, folder: Path, mode: str, about: dict[str, Any]) -> None:
        self.folder, self.mode, self.attempts = folder, mode, 0
        self.process: subprocess.Popen[bytes] | None = None
        self._news: str | None = None
        self.scratch: Path | None = None
        request = about | {"config": vars(config), "folder": str(folder.absolute())}
        request |= {"argv": sys.argv}
        try:
            scratch = Path(tempfile.mkdtemp(prefix="longctx-wandb-"))
            self.file = open(scratch / SENT, "w", encoding="utf-8")  # noqa: SIM115
            self.scratch = scratch
            self._write(request)
            self._start()
        except OSError as error:
            self._news = f"wandb is off: {error}"

    def send(self, message: dict[str, Any]) -> None:
        """Have one message sent; costs no more than a line in a file."""
        if self.process is None:
            return
        try:
            self._write(message)
        except OSError as error:
            self._end(f"{self.file.name}: {error.strerror}")
        if self.process is not None and self.process.poll() is not None:
            self._failed()

    def news(self) -> str | None:
        """What has gone wrong since this was asked before."""
        news, self._news = self._news, None
        return news

    def finish(self, exit_code: int) -> None:
        """Wait until all is sent, for PATIENCE seconds at most."""
        deadline = time.monotonic() + PATIENCE
        self.send({"finish": exit_code})
        while self.process is not None:
            waits = deadline - time.monotonic()
            if self.mode == "online" and not self.begun():
                waits -= PATIENCE - BEGINS
            try:
                self.process.wait(max(waits, 0.0))
            except subprocess.TimeoutExpired:
                if self.mode == "online" and not self.begun():
                    self._failed("gave no answer")
                elif time.monotonic() >= deadline:
                    return self._leave()
            else:
                if self.process.returncode == 0:
                    break
                self._failed()
        if self.scratch is not None:
            with suppress(OSError):
                self.file.close()
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _write(self, message: dict[str, Any]) -> None:
        self.file.write(json.dumps(message, default=str) + "\n")
        self.file.flush()

    def _start(self) -> None:
        assert self.scratch is not None
        self.attempts += 1
        self.before = offline_runs(self.folder)
        self.process = subprocess.Popen(
            python_child.command(
                "longctx.runs.wandb_process", str(self.scratch), self.mode, str(os.getpid())
            ),
            env=python_child.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _failed(self, problem: str = "") -> None:
        """Follow a process that failed by one that copies offline, unless it was that."""
        process = self.process
        assert process is not None and self.scratch is not None
        _kill(process)
        reason = self.scratch / PROBLEM
        if not problem and reason.exists():
            problem = reason.read_text(encoding="utf-8")
        problem = problem or f"its process ended with code {process.returncode}"
        if self.attempts > 1:
            return self._end(problem)
        for leftover in offline_runs(self.folder) - self.before:  # the next copy has it all
            shutil.rmtree(leftover, ignore_errors=True)
        for file in (PROBLEM, BEGUN):
            (self.scratch / file).unlink(missing_ok=True)
        self.mode = "offline"
        uploads = f"wandb sync {self.folder / 'wandb'}/offline-run-*"
        self._news = f"wandb      {problem}; all is copied offline; upload: {uploads}"
        try:
            self._start()
        except OSError as error:
            self._end(str(error))

    def _leave(self) -> None:
        """Wait no longer for a process that still sends: it ends by itself."""
        self._news = self._news or (
            f"wandb      not all is sent after {PATIENCE:.0f} s; if it is not there later: "
            f"wandb sync {self.folder / 'wandb' / (self.begun() or 'offline-run-*')}"
        )

    def _end(self, problem: str) -> None:
        if self.process is not None:
            _kill(self.process)
        self.process = None
        self._news = f"wandb is off: {problem}; {self.folder / 'metrics.jsonl'} has every row"

    def begun(self) -> str:
        """The name of the run's folder at wandb, once it has begun; else empty."""
        assert self.scratch is not None
        with suppress(OSError):
            return (self.scratch / BEGUN).read_text(encoding="utf-8")
        return ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started, in a session of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def log_evaluation(
    config: WandbConfig, folder: Path, content: dict[str, Any], picture: Path | None
) -> str:
    """Send an evaluation of the run in `folder` (its JSON, its PNG) to wandb; returns the mode of
    the copy. Raises RuntimeError, one line, where it failed.

    It is a run of its own, of job type eval and in the group of the run; its files lie in eval/.
    """
    shown = None if picture is None else str(picture.absolute())
    about = {"kind": "eval", "run": folder.name, "content": content, "picture": shown}
    copy = Copy(config, folder / "eval", wandb_mode(config), about)
    copy.finish(0)
    if problem := copy.news():
        raise RuntimeError(problem)
    return copy.mode


def commit() -> str | None:
    """The commit of the checkout that holds this code, `-dirty` where it was changed since; None
    outside of a checkout.
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
    """online, offline or disabled: as configured, else by WANDB_MODE, else by whether there is an
    API key.
    """
    mode = config.mode if config.mode != "auto" else os.environ.get("WANDB_MODE", "auto")
    if mode in ("disabled", "offline", "online"):
        return mode
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    """Whether wandb would find an API key, in the environment or in .netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        logins = netrc.netrc(file)
    except (OSError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(name) is not None for name in ([host] if host else HOSTS))
