"""What every benchmark writes down: the machine and its versions, a table, a JSON file."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import longctx
from longctx import files


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
    from rich.console import Console
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
    Console(width=150).print(shown)


def grid(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print `columns` of `rows`; numbers to three figures, what a row lacks left empty."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(
        *(column.replace("_", " ") for column in columns), title=title, title_justify="left"
    )
    for row in rows:
        shown.add_row(*(cell(row.get(column)) for column in columns))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(shown)


def cell(value: Any) -> str:
    """A value as a person reads it: thousands separated, three significant figures of a fraction."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write `found` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(found, indent=1) + "\n")


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure to `path`, a .png, whole or not at all, and close it."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic(path) as partial:
        figure.savefig(partial, dpi=120)
    plt.close(figure)
