"""Sweeps: each job in a fresh process, one by one, so that a crash costs one job. Torch-free."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import textwrap
from functools import partial
from pathlib import Path
from typing import NamedTuple

from longctx import system, tables
from longctx.runs import metrics, metrics_file
from longctx.runs.metrics import Shown, figures

RESULT_VARIABLE = "LONGCTX_RESULT"  # the file in which a job leaves the name of its folder


class Job(NamedTuple):
    """One job of a sweep: its overrides, how its process ended, its folder (if it came so far)."""

    overrides: list[str]
    code: int
    folder: Path | None


ENDINGS = {
    0: "well",
    2: "mistake",
    **dict.fromkeys(system.EXIT_CODES, "stopped"),
    -9: "killed: out of memory?",
}


def sweep(overrides_of_jobs: list[list[str]]) -> int:
    """Run `longctx train` once per job and print a table of all of them.

    Returns 0 if every job ended well, else 1, or the code of a job that was stopped.
    """
    out = tables.console()
    jobs: list[Job] = []
    for number, overrides in enumerate(overrides_of_jobs, start=1):
        title = f"\n[{number}/{len(overrides_of_jobs)}] {' '.join(overrides)}"
        out.print(title, style="bold")
        jobs.append(_run(overrides))
        if jobs[-1].code in system.EXIT_CODES:
            break
    out.print()
    tables.show("", *sweep_table(jobs))
    folders = [shlex.quote(str(job.folder)) for job in jobs if job.folder and job.folder.exists()]
    if len(folders) > 1:
        text = f"compare    {system.typed_command()} compare {' '.join(folders)}"
        out.print(text, soft_wrap=True)
    stopped = jobs[-1].code in system.EXIT_CODES
    return jobs[-1].code if stopped else int(any(job.code for job in jobs))


def _run(overrides: list[str]) -> Job:
    """Run one job to its end. Pass signals on: the job saves a checkpoint and ends. Ctrl-C also
    reaches it directly, and counts once: see system.TOGETHER.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "folder"
        command = system.python_command("longctx", "train", *overrides)
        env = system.child_environment(**{RESULT_VARIABLE: str(result)})
        end = partial(system.end_with_parent, os.getpid(), signal.SIGTERM)
        process = subprocess.Popen(command, env=env, preexec_fn=end)  # it saves first
        before = {x: signal.signal(x, lambda n, _: process.send_signal(n)) for x in system.SIGNALS}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return Job(overrides, code, Path(result.read_text()) if result.exists() else None)


def sweep_table(jobs: list[Job]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and of each job the overrides in which jobs differ, its results, its end."""
    results = [figures(metrics_file.read(job.folder)) if job.folder else {} for job in jobs]
    known = {key for result in results for key in result}
    columns = [metric for metric in metrics.shown(Shown.CLOSING) if metric.key in known]
    table: list[list[str]] = []
    shared = set.intersection(*(set(job.overrides) for job in jobs))
    for job, result in zip(jobs, results, strict=True):
        differing = [override for override in job.overrides if override not in shared]
        cells = (x.format(result[x.key]) if x.key in result else "" for x in columns)
        ending = ENDINGS.get(job.code, f"failed ({job.code})")
        # The folder in a line of its own keeps the table narrow
        name = "\n".join([" ".join(differing or job.overrides), str(job.folder or "")])
        table.append([name.strip(), *cells, ending])
    return ["job", *(textwrap.fill(metric.heading, 11) for metric in columns), "ended"], table
