"""Run folders as train.py leaves them, written by hand, and the page that compares them."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longctx.report import compare as report

DATA = re.compile(r'(?<=<script type="application/json" id="data">).*?(?=</script>)', re.DOTALL)


def step(number: int, **more: Any) -> dict[str, Any]:
    """A row of a training step."""
    row = {"step": number, "tokens_seen": 100 * number, "loss": 5 / number}
    row |= {"grad_norm": 1.0, "lr": 1e-3, "ms_per_step": 9.0, "memory_peak_gib": 2.5}
    row |= {"tokens_per_second": 1000.0 + number, "seconds": 0.1 * number}
    return row | more


def make(
    folder: Path,
    rows: list[dict[str, Any]] | None = None,
    tail: str = "",
    config: str = "",
    **files: Any,
) -> Path:
    """A run of 20 steps; `config` has the lines that differ. Of `files`, lock is its kernel.lock,
    others are evaluations.
    """
    (folder / "eval").mkdir(parents=True)
    usual = ["max_steps: 20", "seq_len: 64"]
    lines = [config or "lr: 0.001", *(line for line in usual if line.split()[0] not in config)]
    lines += [f"name: {folder.parent.name}", "attention: {backend: flash}"]
    (folder / "config.yaml").write_text("\n".join(lines))
    last = {"step": 20, "tokens_seen": 2000, "val_loss": 1.0, "val_perplexity": math.e}
    rows = [*(step(n) for n in range(1, 21)), last] if rows is None else rows
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    for name, content in files.items():
        file = "kernel.lock.json" if name == "lock" else f"eval/{name}.json"
        (folder / file).write_text(json.dumps(content))
    return folder


def compare(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Do as `longctx compare`; return the data of the page."""
    report.compare(list(folders), out)
    (text,) = DATA.findall(out.read_text())
    data: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    return data
