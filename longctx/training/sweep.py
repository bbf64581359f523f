"""A sweep: each job in a fresh process, one after the other, so that a crash costs one job. Torch-free."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from longctx.training.progress import Row, sweep_table
from longctx.training.runs import read_metrics


def sweep(script: str, jobs: list[list[str]]) -> int:
    """Run `script` once per job and print a table of all of them; returns 0 if every job ended well, else 1."""
    console = Console(highlight=False)
    results: list[tuple[list[str], int, list[Row]]] = []
    stopped = 0
    for number, words in enumerate(jobs, start=1):
        console.print(f"\n[{number}/{len(jobs)}] {' '.join(words)}", markup=False, style="bold")
        code, rows = _job(script, words)
        results.append((words, code, rows))
        if code in (130, 143, -2, -15):
            stopped = abs(code) % 128 + 128
            break
    console.print()
    console.print(sweep_table(results))
    return stopped or int(any(code for _, code, _ in results))


def _job(script: str, words: list[str]) -> tuple[int, list[Row]]:
    """Exit code and rows of metrics.jsonl of one job; Ctrl-C goes to the job, which saves a checkpoint and ends."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "folder"
        process = subprocess.Popen(
            [sys.executable, os.path.abspath(script), *words], env=os.environ | {"LONGCTX_RESULT": str(result)}
        )
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                continue
        return code, read_metrics(Path(result.read_text())) if result.exists() else []
