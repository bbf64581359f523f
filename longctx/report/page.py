"""The page of a comparison: page.html with the data as JSON in it. It needs no network and no
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
from typing import Any

from longctx.files import write_text
from longctx.report.run_tables import Table
from longctx.report.run_view import Run
from longctx.runs import metrics
from longctx.runs.metrics import STEP_PARTS, Shown, finite


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
    """Write the page to `out` atomically."""
    text = html(runs, tables, notes)
    try:
        write_text(out, text)
    except OSError as error:
        raise OSError(f"out={out}: cannot be written: {error.strerror}") from error


def html(runs: list[Run], tables: list[Table], notes: list[str]) -> str:
    """The page."""
    data = {
        "curves": headings(Shown.CURVE),
        "lengths": headings(Shown.CONTEXT),
        "runs": [described(run) for run in runs],
        "tables": [table._asdict() | {"best": sorted(table.best)} for table in tables],
        "notes": notes,
    }
    template = (files("longctx.report") / "page.html").read_text(encoding="utf-8")
    return template.replace("DATA_AS_JSON", embedded(data), 1)


def headings(place: Shown) -> dict[str, str]:
    """Key and title of each metric that is drawn in `place`."""
    return {metric.key: metric.heading for metric in metrics.shown(place)}


def described(run: Run) -> dict[str, Any]:
    """What the page draws of a run."""
    scores = run.evaluations.perplexities
    evaluated = next((score["positions"] for score in scores if score["positions"]["x"]), None)
    return {
        "label": run.label,
        "backend": str(run.config.get("attention.backend", "")),
        "seq_len": run.config.get("seq_len"),
        "figures": {
            key: run.figures[key]
            for key in headings(Shown.CONTEXT)
            if key in run.figures and finite([run.figures[key]])
        },
        "curves": run.curves,
        "positions": run.positions or evaluated,
        "contexts": next((score["contexts"] for score in scores if score["contexts"]["x"]), None),
        "split": split(run),
        "passkeys": run.evaluations.passkeys,
        "rulers": run.evaluations.rulers,
    }


def split(run: Run) -> dict[str, float]:
    """Milliseconds of each part of a step, {} where the rows do not tell."""
    parts = {
        metric.label: run.figures[metric.key]
        for metric in metrics.METRICS
        if metric.panel == STEP_PARTS and metric.key in run.figures
    }
    if "forward_ms" not in run.figures or "ms_per_step" not in run.figures:
        return {}
    parts["rest"] = max(0.0, run.figures["ms_per_step"] - sum(parts.values()))
    return {label: float(f"{value:.4g}") for label, value in parts.items()}


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: without `<`, `>` and `&`, and in ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
