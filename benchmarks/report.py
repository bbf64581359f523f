"""What every benchmark writes down: the machine and its versions, a JSON file, a picture."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import longctx
from benchmarks.processes import ROOT
from longctx import files


def machine() -> dict[str, str]:
    """Return the GPU, the versions and the commit that a figure depends on."""
    import torch

    described = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(described, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
        "longctx": longctx.__version__,
        "commit": commit or "unknown",
    }


def short(tokens: int) -> str:
    """4096 → 4K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(content, indent=1) + "\n")


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure to `path`, a .png, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic(path) as partial:
        figure.savefig(partial, dpi=120)


def dress(axis: Any, title: str, x: str, **texts: Any) -> None:
    """Give a matplotlib axis title, labels and scales, a grid, and numbers with commas."""
    axis.set(title=title, xlabel=x, **texts)
    axis.yaxis.set_major_formatter(lambda y, _: f"{round(y, 3):,}".removesuffix(".0"))
    axis.grid(alpha=0.3)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return Markdown of `rows`."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row.get(name, "")) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
