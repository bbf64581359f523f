"""The page of a comparison: page.html, in which the data stand as JSON. It needs no network and no
library.

Names of runs are anybody's: no letter of the data can end the script element that holds them, and
the page makes text nodes of them, never HTML.
"""

from __future__ import annotations

import json
import os
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.files import write_text
from longctx.report.runs import CURVES, PARTS, Run, memory

if TYPE_CHECKING:
    from longctx.report.compare import Table


def check(out: Path) -> None:
    """Raise OSError unless a page can be written to `out`."""
    if out.is_dir():
        raise OSError(
            f"out={out}: a folder; give the name of a file, such as {out / 'compare.html'}"
        )
    try:
        descriptor, name = tempfile.mkstemp(prefix=".longctx-", dir=out.parent)
    except OSError as error:
        raise OSError(
            f"out={out}: no file can be made in {out.parent}: {error.strerror}; choose another"
        ) from error
    os.close(descriptor)
    os.unlink(name)


def write(out: Path, runs: list[Run], tables: list[Table], notes: list[str]) -> None:
    """Write the page to `out`, whole or not at all."""
    text = html(runs, tables, notes)
    try:
        write_text(out, text)
    except OSError as error:
        raise OSError(f"out={out}: cannot be written: {error.strerror}") from error


def html(runs: list[Run], tables: list[Table], notes: list[str]) -> str:
    """The page."""
    data = {
        "curves": CURVES,
        "runs": [described(run) for run in runs],
        "tables": [table._asdict() | {"best": sorted(table.best)} for table in tables],
        "notes": notes,
    }
    template = (files("longctx.report") / "page.html").read_text(encoding="utf-8")
    return template.replace("DATA_AS_JSON", embedded(data), 1)


def described(run: Run) -> dict[str, Any]:
    """What the page draws of a run."""
    return {
        "label": run.label,
        "backend": str(run.config.get("attention.backend", "")),
        "seq_len": run.config.get("seq_len"),
        "tokens_per_second": run.figures.get("tokens_per_second"),
        "memory": memory(run.figures),
        "curves": run.curves,
        "positions": run.positions
        or next((e["positions"] for e in run.evaluations if e["positions"]["x"]), None),
        "contexts": next((e["contexts"] for e in run.evaluations if e["contexts"]["x"]), None),
        "split": split(run),
        "passkeys": run.passkeys,
    }


def split(run: Run) -> dict[str, float]:
    """Milliseconds of each part of a step, {} where the rows do not tell."""
    parts = {key: run.figures[key] for key in PARTS if key in run.figures}
    if "forward_ms" not in parts or "ms_per_step" not in run.figures:
        return {}
    parts["rest_ms"] = max(0.0, run.figures["ms_per_step"] - sum(parts.values()))
    return {
        key.removesuffix("_ms").replace("_", " "): float(f"{value:.4g}")
        for key, value in parts.items()
    }


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: without `<`, `>` and `&`, and in ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
