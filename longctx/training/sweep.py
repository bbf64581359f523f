"""A sweep: each job in a fresh process, one after the other, so that a crash costs one job.
Torch-free.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from pathlib import Path

from longctx import python_child
from longctx.training.console import Job, console, sweep_table

RESULT_VARIABLE = "LONGCTX_RESULT"  # the file in which a job leaves the name of its folder
STOPPED = (130, 143)  # exit codes of Ctrl-C and SIGTERM


def sweep(overrides_of_jobs: list[list[str]]) -> int:
    """Run `longctx train` once per job and print a table of all of them.

    Returns 0 if every job ended well, else 1, or the code of a job that was stopped.
    """
    out = console()
    jobs: list[Job] = []
    for number, overrides in enumerate(overrides_of_jobs, start=1):
        title = f"\n[{number}/{len(overrides_of_jobs)}] {' '.join(overrides)}"
        out.print(title, markup=False, style="bold")
        jobs.append(_run(overrides))
        if jobs[-1].code in STOPPED:
            break
    out.print()
    out.print(sweep_table(jobs))
    return jobs[-1].code if jobs[-1].code in STOPPED else int(any(job.code for job in jobs))


def _run(overrides: list[str]) -> Job:
    """Run one job to its end. Ctrl-C reaches it too, a SIGTERM is passed on: it saves a checkpoint
    and ends, which is waited for.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "folder"
        command = python_child.command("longctx", "train", *overrides)
        env = python_child.environment(**{RESULT_VARIABLE: str(result)})
        process = subprocess.Popen(command, env=env)
        before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        try:
            while True:
                try:
                    code = process.wait()
                    break
                except KeyboardInterrupt:
                    continue
        finally:
            signal.signal(signal.SIGTERM, before)
        return Job(overrides, code, Path(result.read_text()) if result.exists() else None)
