"""The page of a comparison: page.html with the data of the runs as JSON in it.

It needs no network and no library. Anybody can name a run: no letter of the data can end the script
element that holds them, and the page makes text nodes of them, never HTML.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from longctx import files
from longctx.report.run_view import Run
from longctx.runs.metrics import METRICS, STEP_PARTS, Metric, Row, Shown, finite, shown


class Table(NamedTuple):
    """Cells as text, a run's label first; `best` are the (row, column) of each column's best
    number.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    best: Collection[tuple[int, int]] = ()
    keys: int = 1  # columns that name a row


def write_page(out: Path, runs: list[Run], tables: list[Table], notes: list[str]) -> None:
    """Write the page to `out` atomically."""
    data = {
        "curves": headings(Shown.CURVE),
        # Their first values are so large that later differences would not show
        "late": [metric.key for metric in shown(Shown.CURVE) if is_loss(metric)],
        "lengths": headings(Shown.CONTEXT),
        "runs": [described(run) for run in runs],
        "tables": [table._asdict() | {"best": sorted(table.best)} for table in tables],
        "notes": notes,
    }
    template = (resources.files("longctx.report") / "page.html").read_text(encoding="utf-8")
    files.write_for_key("out", out, template.replace("DATA_AS_JSON", embedded(data), 1))


def headings(view: Shown) -> dict[str, str]:
    """Return key and title of each metric that is drawn in `view`."""
    return {metric.key: metric.heading for metric in shown(view)}


def described(run: Run) -> dict[str, Any]:
    """Return the data that the page draws of a run."""
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
        "warm": run.warm,
        "positions": run.positions or evaluated,
        "contexts": next((score["contexts"] for score in scores if score["contexts"]["x"]), None),
        "split": split(run.figures),
        "passkeys": run.evaluations.passkeys,
        "rulers": run.evaluations.rulers,
    }


def split(figures: Row) -> dict[str, float]:
    """Return the milliseconds of each part of a step, {} if the rows do not have them."""
    if "forward_ms" not in figures or "ms_per_step" not in figures:
        return {}
    parts = {
        metric.label: figures[metric.key]
        for metric in METRICS
        if metric.panel == STEP_PARTS and metric.key in figures
    }
    parts["rest"] = max(0.0, figures["ms_per_step"] - sum(parts.values()))
    return {label: float(f"{value:.4g}") for label, value in parts.items()}


def embedded(data: Any) -> str:
    """Return JSON that can be in a script element: without `<`, `>` and `&`, and in ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def is_loss(metric: Metric) -> bool:
    """Return True for a loss, which can only be compared over the same documents."""
    return metric.better == "min" and metric.panel is not None and metric.panel.section == "Loss"
