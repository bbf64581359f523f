"""A sweep: each job in a fresh process, one after the other, so that a crash costs one job.
Torch-free.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from longctx import python_child, stop_signal
from longctx.tables import show
from longctx.training.console import Job, console, sweep_table

VARIED_VARIABLE = "LONGCTX_VARIED"  # the keys in which jobs differ, joined by commas
RESULT_VARIABLE = "LONGCTX_RESULT"  # the file in which a job leaves the name of its folder


def sweep(overrides_of_jobs: list[list[str]]) -> int:
    """Run `longctx train` once per job and print a table of all of them.

    Returns 0 if every job ended well, else 1, or the code of a job that was stopped.
    """
    out = console()
    jobs: list[Job] = []
    shared = set.intersection(*map(set, overrides_of_jobs))
    varied = {one.partition("=")[0] for each in overrides_of_jobs for one in {*each} - shared}
    for number, overrides in enumerate(overrides_of_jobs, start=1):
        title = f"\n[{number}/{len(overrides_of_jobs)}] {' '.join(overrides)}"
        out.print(title, markup=False, style="bold")
        jobs.append(_run(overrides, varied - {"attention", "model", "data", "seq_len"}))
        if jobs[-1].code in stop_signal.EXIT_CODES:
            break
    out.print()
    show(sweep_table(jobs), output=out)
    folders = [shlex.quote(str(job.folder)) for job in jobs if job.folder]
    if len(folders) > 1:
        text = f"compare    longctx compare {' '.join(folders)}"
        out.print(text, markup=False, soft_wrap=True)
    stopped = jobs[-1].code in stop_signal.EXIT_CODES
    return jobs[-1].code if stopped else int(any(job.code for job in jobs))


def _run(overrides: list[str], varied: set[str]) -> Job:
    """Run one job to its end. Ctrl-C reaches it too, other signals are passed on: it saves a
    checkpoint and ends, which is waited for.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "folder"
        command = python_child.command("longctx", "train", *overrides)
        variables = {RESULT_VARIABLE: str(result), VARIED_VARIABLE: ",".join(sorted(varied))}
        env = python_child.environment(**variables)
        process = subprocess.Popen(command, env=env)

        def pass_on(number: int, frame: Any) -> None:
            if number != signal.SIGINT:
                process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in stop_signal.SIGNALS}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return Job(overrides, code, Path(result.read_text()) if result.exists() else None)
