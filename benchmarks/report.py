"""What every benchmark writes down: the machine and its versions, a table, a JSON file."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import longctx
from longctx import files
from longctx.tables import grid as grid
from longctx.tables import show as show


def machine() -> dict[str, str]:
    """The GPU and the versions that a figure depends on."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
        "longctx": longctx.__version__,
    }


def table(rows: list[dict[str, Any]], title: str) -> None:
    """Print one case: a line per backend, or why it was left out."""
    from rich.table import Table

    columns = [
        f"{part}_{unit}"
        for part in ("forward", "backward", "both")
        for unit in ("ms", "tflops", "ratio")
    ]
    shown = Table("backend", *(column.replace("_", " ") for column in columns), title=title)
    for row in rows:
        reason = (
            [row["skipped"]]
            if "skipped" in row
            else [str(row.get(column, "")) for column in columns]
        )
        shown.add_row(row["backend"], *reason)
    show(shown)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(content, indent=1) + "\n")


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure to `path`, a .png, whole or not at all, and close it."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic(path) as partial:
        figure.savefig(partial, dpi=120)
    plt.close(figure)
