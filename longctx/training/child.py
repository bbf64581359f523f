"""Work in a child process, whose running out of memory harms nobody."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longctx import python_child
from longctx.distributed.launched import without_launcher
from longctx.training.run import Run

OUT_OF_MEMORY = "out of memory"


@dataclass
class DryRun:
    """What a few steps took; `failed` is None, OUT_OF_MEMORY or what else went wrong."""

    ms: list[float]  # of each step
    tokens: int = 0  # of one step
    pairs: float = 0  # visible (query, key) pairs of one step and head, the mean over the layers
    memory: dict[str, float] = field(default_factory=dict)  # as in metrics.jsonl
    kernels: dict[str, str] = field(default_factory=dict)
    failed: str | None = None


def dry_run_in_child(
    run: Run, steps: int, document: int | None, validate: bool, seconds: float
) -> DryRun:
    """`longctx.training.dry_run.dry_run` in a child process, ended after `seconds`.

    Whatever happens to it is `failed`, in one line.
    """
    request = {"settings": run.settings(), "device": run.workload.device, "steps": steps}
    request |= {"document": document, "validate": validate}
    answer = in_child("longctx.training.dry_run", request, seconds)
    return DryRun([], failed=answer) if isinstance(answer, str) else DryRun(**answer)


def in_child(module: str, request: dict[str, Any], seconds: float) -> dict[str, Any] | str:
    """What `python -m module REQUEST OUT` writes to OUT, both files of JSON.

    One line where it writes nothing within `seconds`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        request_file, out = Path(scratch, "request.json"), Path(scratch, "out.json")
        request_file.write_text(json.dumps(request))
        try:
            process = subprocess.run(
                python_child.command(module, str(request_file), str(out)),
                env=without_launcher(python_child.environment()),
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:.0f} s"
        if out.exists():
            answer: dict[str, Any] = json.loads(out.read_text())
            return answer
    if process.returncode == -9:
        return f"{OUT_OF_MEMORY}: the process was killed"
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"
