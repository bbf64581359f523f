"""Run folders as train.py leaves them, written by hand."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from longctx.config.command_config import CompareOptions
from longctx.report import compare as report


def step(number: int, **more: float) -> dict[str, float]:
    """A row of a training step."""
    same = {"grad_norm": 1.0, "lr": 1e-3, "ms_per_step": 9.0, "memory_peak_gib": 2.5}
    times = {"tokens_per_second": 1000.0 + number, "seconds": 0.1 * number}
    return {
        **{"step": number, "tokens_seen": 100 * number, "loss": 5 / number},
        **same,
        **times,
        **more,
    }


def make(
    folder: Path, rows: list[dict[str, float]] | None = None, tail: str = "", config: str = ""
) -> Path:
    """A run of 20 steps; `config` stands for the one line that may differ."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"{config or 'lr: 0.001'}\nmax_steps: 20\nseq_len: 64\nname: {folder.parent.name}\n"
        "attention: {backend: flash}\n"
    )
    last = {"step": 20, "tokens_seen": 2000, "val_loss": 1.0, "val_perplexity": math.e}
    rows = [*(step(n) for n in range(1, 21)), last] if rows is None else rows
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def compare(folders: Sequence[Path], out: Path) -> None:
    """Do as `longctx compare`."""
    report.compare(CompareOptions(list(folders), out))
