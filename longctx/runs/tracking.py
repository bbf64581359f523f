"""Tracking: metrics.jsonl, the truth, and its copies by `tracker=`.

Each tracker lives in a process of its own, `python -m longctx.runs.tracking NAME`: one that fails
or hangs stops neither the run nor the others. It follows metrics.jsonl, which has every record, so
the run sends it only the end. A thread would not do: at the end of a process wandb
waits without a limit for its core, and an end without that wait drops unfinished uploads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

from longctx import files, plugins, system
from longctx.config.doors import TRACKERS
from longctx.config.train_config import WandbConfig
from longctx.runs import metrics_file
from longctx.runs.metrics import Record

PATIENCE = 9.0  # seconds that the end of a run waits for copies; 10 are promised
PAUSE = 0.2  # seconds between two looks of a copy for new rows
LASTS = 600.0  # seconds that a copy may still send after the end of its run
Commands = Iterator[dict[str, Any]]


class Tracker:
    """Append records to metrics.jsonl in `folder`; from `start_copies` on, `names` get copies."""

    def __init__(
        self,
        folder: Path,
        config: WandbConfig,
        names: Sequence[str] = ("wandb",),
        plugins: Sequence[str] = (),  # which may have registered trackers
    ) -> None:
        openings = {name: TRACKERS[name].opening(config, folder) for name in names}
        self.names = [name for name, lines in openings.items() if lines]
        # Lines that show the user the targets of the copies
        self.opening = [f"{name:<10} " + f"\n{'':11}".join(openings[name]) for name in self.names]
        self._file = open(folder / metrics_file.FILE, "a+", encoding="utf-8")  # noqa: SIM115
        self._file.seek(0)
        before = sum(1 for _ in self._file)
        self._about = {"records_before": before, "plugins": plugins, "config": vars(config)}
        self._folder, self._copies = folder, list[Copy]()

    def log(self, record: Record) -> None:
        """Append one record, `step` and `tokens_seen` among its keys."""
        if self._folder.is_dir() and not os.fstat(self._file.fileno()).st_nlink:
            self._file.seek(0)  # deleted, but whole in this open file
            files.write_text(path := self._folder / metrics_file.FILE, self._file.read())
            self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        metrics_file.append(self._file, record)

    def start_copies(self, metadata: dict[str, Any]) -> None:
        """Begin the copies, once, with `metadata` as the configuration that they show."""
        if not self._copies:
            about = self._about | {"metadata": metadata}
            self._copies = [Copy(name, self._folder, about) for name in self.names]

    def problem(self) -> str | None:
        """Return lines about copies that failed, once."""
        return "\n".join(filter(None, [copy.news() for copy in self._copies])) or None

    def finish(self, exit_code: int) -> str | None:
        """Close the file, and the copies once they have everything, or after PATIENCE seconds;
        return lines about those that failed.
        """
        with suppress(OSError):  # of a full disk, which `log` has raised already
            self._file.close()
        finish(self._copies, exit_code)
        return self.problem()


class Copy:
    """A process that copies to the tracker `name`. It follows a file of commands and writes its
    news to another. Raises nothing: `news` has a line about a failure.
    """

    def __init__(self, name: str, folder: Path, about: dict[str, Any]) -> None:
        self.name, self.folder = name, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.problems: list[str] = []
        self._news_read, self._sent = 0, 0
        own = {"folder": str(folder.absolute()), "argv": sys.argv, "parent": os.getpid()}
        try:
            # Files instead of pipes: a process that hangs must not hold up the run
            self._commands = tempfile.TemporaryFile()  # noqa: SIM115 (open while the copy lives)
            self._output = tempfile.TemporaryFile()  # noqa: SIM115
            self.send(about | own)
            self.process = subprocess.Popen(
                system.python_command("longctx.runs.tracking", name),
                env=system.child_environment(),
                stdin=self._commands,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self.problems = [f"{name} is off: {error}; metrics.jsonl has every record"]

    def send(self, command: dict[str, Any]) -> None:
        """Append one command: the request or the end."""
        line = json.dumps(command, default=str).encode() + b"\n"
        # The process shares the offsets of both files, so neither side moves them
        with suppress(OSError):  # the disk of temporary files is full
            self._sent += os.pwrite(self._commands.fileno(), line, self._sent)

    def news(self) -> str | None:
        """Return what has gone wrong since the last call."""
        news, self.problems = self.problems, []
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


def finish(copies: Sequence[Copy], exit_code: int) -> None:
    """Wait until the copies have everything, for PATIENCE seconds at most together."""
    alive = [(copy, copy.process) for copy in copies if copy.process is not None]
    for copy, _ in alive:
        copy.send({"finish": exit_code})
    deadline = time.monotonic() + PATIENCE
    for copy, process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = TRACKERS[copy.name].late.format(folder=copy.folder)
            later = f"; if it is not there later: {late}" if late else ""
            line = f"not all is sent after {PATIENCE:.0f} s, the rest follows{later}"
            copy.problems.append(f"{copy.name:<10} {line}")


def log_evaluation(config: WandbConfig, folder: Path, content: dict[str, Any]) -> None:
    """Send an evaluation of the run in `folder` (its JSON) to wandb. Raises RuntimeError, one
    line, if it failed.
    """
    # It is a run of its own, of job type eval and in the group of the run; its files are in eval/.
    about = {"config": vars(config), "run": folder.name, "content": content}
    copy = Copy("wandb", folder / "eval", about)
    finish([copy], 0)
    if problem := copy.news():
        raise RuntimeError(problem)


def copy_to(name: str) -> NoReturn:
    """Copy to the tracker `name` the run or evaluation in the first line on stdin, until the parent
    finishes or ends.
    """
    # A launcher sends signals to the whole job; the run alone decides what they mean
    for number in system.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    commands = follow_stdin()
    request = next(commands)
    Thread(target=end_after, args=(request["parent"],), daemon=True).start()
    # wandb records the command of the run instead of the command of this process
    sys.argv = request["argv"]
    try:
        plugins.load(request.get("plugins", ()))
        # Trackers print to stdout, whose lines the run would show. wandb leaves temporary folders
        with (
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            tempfile.TemporaryDirectory() as tempfile.tempdir,
        ):
            TRACKERS[name].copy(request, commands)
    except BaseException as error:  # the tracker's own errors, the network's, the disk's
        report(f"{name} is off: {files.one_line(error)[:500]}; metrics.jsonl has every record")
        os._exit(1)
    # The interpreter's own end would wait for a core that is gone or stopped
    os._exit(0)


def report(line: str) -> None:
    """Send a line about a failure to the parent, which shows it."""
    print(line, file=sys.__stdout__, flush=True)


def follow(request: dict[str, Any], commands: Commands) -> Iterator[Record]:
    """Yield every record of a run, those of earlier starts first, until `commands` finish; then
    `request` has its "exit_code".
    """
    tail, sent = metrics_file.Tail(Path(request["folder"])), 0
    for command in commands:
        # Reading after the command yields all records before the end. A deleted file is written
        # anew, with the records that were sent
        before, new = tail.inode, tail.records()
        new = new if tail.inode == before else new[sent:]
        sent += len(new)
        yield from new
        if "finish" in command:
            request["exit_code"] = command["finish"]
            return


def follow_stdin() -> Commands:
    """Yield the commands in the file on stdin; {} after PAUSE seconds without a new one."""
    # The parent appends to the file. After the parent's end comes {"finish": 1}.
    position, parent = 0, 0
    while True:
        is_orphan = parent not in (0, os.getppid())
        # Only whole lines: the parent may be writing the last one
        size = os.fstat(0).st_size
        *lines, _ = os.pread(0, size - position, position).split(b"\n")
        for line in lines:
            position += len(line) + 1
            command = json.loads(line)
            parent = command.get("parent", parent)
            yield command
        if is_orphan:
            yield {"finish": 1}
        if not lines:
            time.sleep(PAUSE)
            yield {}


def end_after(parent: int) -> None:
    """End this process LASTS seconds after its parent, even if wandb hangs."""
    while os.getppid() == parent:
        time.sleep(PAUSE)
    system.exit_within(LASTS, 1)


if __name__ == "__main__":
    copy_to(*sys.argv[1:])
