"""The process that copies a run to one tracker: `python -m longctx.runs.tracker_process NAME`.

It follows metrics.jsonl, which has every row, so its parent (tracking.py) sends only uploads and
the end. A thread would not do: at the end of a process wandb waits without a limit for its core,
and an end without that wait drops unfinished uploads. A line on stdout tells what went wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from threading import Thread
from typing import Any, NoReturn

from longctx import plugins, system
from longctx.config.doors import TRACKERS
from longctx.files import one_line

PAUSE = 0.2  # seconds between two looks for new rows
LASTS = 600.0  # seconds that this process may still send after the end of its parent
Commands = Iterator[dict[str, Any]]


def main(name: str, *arguments: str) -> NoReturn:
    """Copy the run or evaluation in the first line on stdin, until the parent finishes or ends."""
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
        # Trackers print to stdout, whose lines the run would show
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            TRACKERS[name].copy(request | {"arguments": arguments}, commands)
    except BaseException as error:  # the tracker's own errors, the network's, the disk's
        report(f"{name} is off: {one_line(error)[:500]}; metrics.jsonl has every row")
        os._exit(1)
    # The interpreter's own end would wait for a core that is gone or stopped
    os._exit(0)


def report(line: str) -> None:
    """Send a line to the parent, which shows it."""
    print(line, file=sys.__stdout__, flush=True)


def follow_stdin() -> Commands:
    """Yield the commands in the file on stdin; {} after PAUSE seconds without a new one.

    The parent appends to the file. After the parent's end comes {"finish": 1}.
    """
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
    main(*sys.argv[1:])
