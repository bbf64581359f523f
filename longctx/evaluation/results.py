"""The results of an evaluation: tables on the terminal, a JSON, a picture, and a copy at wandb.

All of them are made from the content of the JSON. A perplexity has "documents", pass keys have
"kinds", RULER has "ruler", and tasks of lm-evaluation-harness have "results".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from longctx import files, tables
from longctx.config.train_config import WandbConfig
from longctx.evaluation.load import TrainedModel
from longctx.evaluation.ruler import TASKS
from longctx.runs import evaluations
from longctx.runs.tracking import log_evaluation
from longctx.runs.wandb_copy import wandb_mode

SHOWN = 3  # documents in each group of a long table
Content = dict[str, Any]


def save(content: Content, stem: str, model: TrainedModel, wandb: str) -> Path:
    """Write the JSON and the picture, send both to wandb if asked for, and return the JSON's path.

    The file of an earlier evaluation with the same keys is replaced; one with others stays. wandb
    goes to the project and group of the run. If it fails, the files are there, and a line on stderr
    says so.
    """
    path = evaluations.path_for(model.home / evaluations.FOLDER, stem, content["asked"])
    evaluations.write(content, path)
    picture = draw(content, path.with_suffix(".png"))
    if wandb_mode(WandbConfig(mode=wandb)) == "disabled":
        return path
    saved = (model.run or {}).get("wandb", {})
    known = {key: value for key, value in saved.items() if key in vars(WandbConfig())}
    try:
        settings = replace(WandbConfig(**known), mode=wandb)
        log_evaluation(settings, model.home, content, picture)
    except Exception as error:  # wandb's own errors, the network's, the disk's
        print(f"wandb is off: {files.one_line(error)}", file=sys.stderr)
    return path


def show(content: Content) -> None:
    """Print the tables of an evaluation."""
    if "total" in content:
        show_perplexity(content)
        return
    if "results" in content:
        columns = {"task": "{task}", "metric": "{metric}", "value": "{value:,.4f}"}
        columns["± standard error"] = "{error:,.4f}"
        rows = evaluations.task_scores(content["results"])
        tables.show(table("lm-evaluation-harness", columns, rows), keys=2)
        return
    for title, names, lengths, shares in grids(content):
        rows_of_grid = [[name, *map(percent, row)] for name, row in zip(names, shares, strict=True)]
        headings = ["tokens", *map("{:,}".format, lengths)]
        tables.show(tables.text_table(title, headings, rows_of_grid))
    if any(TASKS[task].essay for task in content.get("ruler", {}).get("scores", ())):
        print("essays are your own text, where RULER has Paul Graham's")
    if content.get("made"):
        tasks = " and ".join(content["made"])
        print(f"{tasks}: questions made from your own text, not RULER's data")


class Grid(NamedTuple):
    """Shares, 0 to 1, of what a model finds: of each name [length]."""

    title: str
    names: Sequence[str]
    lengths: Sequence[int]
    shares: Sequence[Sequence[float]]


def grids(content: Content) -> list[Grid]:
    """Return the grid of each kind of pass keys, by depth, or that of RULER's tasks."""
    if "ruler" in content:
        lengths, scores = evaluations.ruler_rows(content)
        return [Grid("RULER: score by task", list(scores), lengths, list(scores.values()))]
    return [
        Grid(
            f"{kind}: right answers by depth",
            [*map(percent, grid["depths"]), "mean"],
            grid["lengths"],
            [*zip(*grid["accuracy"], strict=True), [fmean(row) for row in grid["accuracy"]]],
        )
        for kind, grid in content["kinds"].items()
    ]


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def show_perplexity(content: Content) -> None:
    """Print documents, loss by position and loss over context; time and memory."""
    tables.show(documents_table(content))
    positions, contexts = content["by_position"], content["by_context"]
    if positions:
        rows = [row | {"span": f"{row['first']:,} – {row['last']:,}"} for row in positions]
        rows[0]["span"] = "1"
        title = f"loss by position, {positions[0]['tokens']:,} documents"
        columns = {"tokens before": "{span}", "tokens": "{tokens:,}", "loss": "{loss:.4f}"}
        tables.show(table(title, columns, rows))
    if contexts:
        title = "the same {tokens:,} tokens of {documents:,} documents".format(**contexts[0])
        columns = {"context": "{context:,}", "loss": "{loss:.4f}"}
        columns |= {"perplexity": "{perplexity:,.3f}", "gain (nats)": "{gain:.4f}"}
        tables.show(table(title, columns, contexts))
    speed, memory = content["tokens_per_second"], content["memory_peak_gib"]
    parts = [f"{content['seconds']:,.1f} s"]
    parts += [f"{speed:,.0f} tokens/s through the model after the first batch"] if speed else []
    parts += [f"{memory:.1f} GiB"] if memory else []
    print(", ".join(parts))


def table(title: str, columns: dict[str, str], rows: Iterable[Content] = ()) -> Table:
    """Return a table of `rows`; `columns` are headings with the format of their cells."""
    return tables.text_table(title, list(columns), [cells(columns, row) for row in rows])


def cells(columns: dict[str, str], row: Content, style: str = "") -> list[Text]:
    """Return the cells of a row, empty for a number that is missing."""
    numbers = {key: math.nan if value is None else value for key, value in row.items()}
    texts = (form.format(**numbers) for form in columns.values())
    return [Text("" if text == "nan" else text, style) for text in texts]


def documents_table(content: Content) -> Table:
    """Return every document, or the longest, best and worst of many, and the sums over all."""
    columns = {
        "document": "{name}",
        "tokens": "{tokens:,}",
        "bytes": "{bytes:,}",
        "perplexity": "{perplexity:,.3f}",
        "word perplexity": "{word_perplexity:,.4g}",
        "bits per byte": "{bits_per_byte:.4f}",
    }
    scored = [row for row in content["documents"] if row["tokens"]]
    by_perplexity = sorted(scored, key=lambda row: row["perplexity"])
    # A data set has thousands of documents: a few say enough, and the JSON has them all.
    groups = {"": by_perplexity}
    if len(scored) > 3 * SHOWN:
        groups = {
            "longest": sorted(scored, key=lambda row: -row["tokens"])[:SHOWN],
            "best": by_perplexity[:SHOWN],
            "worst": by_perplexity[-SHOWN:],
        }
    rows: list[list[Text]] = []
    for heading, scores in groups.items():
        rows += [[Text(heading, "dim"), *[Text()] * (len(columns) - 1)]] if heading else []
        rows += [cells(columns, row) for row in scores]
    total = content["total"]
    # The standard error is of the loss, so it counts times the perplexity.
    if not math.isnan(total["standard_error"]):
        error = total["perplexity"] * total["standard_error"]
        columns["perplexity"] += f" ± {error:,.3f}"
    title = f"context {content['context']:,}, stride {content['stride']:,}"
    return tables.text_table(title, list(columns), [*rows, cells(columns, total, "bold")])


def draw(content: Content, path: Path) -> Path | None:
    """Write a PNG to `path` and return it; None for tasks, which have no picture."""
    if "results" in content:
        return None
    figure = draw_perplexity(content) if "total" in content else draw_grids(grids(content))
    with files.atomic(path) as partial:
        figure.savefig(partial, dpi=120)
    return path


def draw_perplexity(content: Content) -> Figure:
    """Draw loss by position, loss over context, and documents, if there are any of them."""
    panels = [key for key in ("by_position", "by_context", "documents") if content[key]]
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for key, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        rows = content[key]
        axes.set(ylabel="loss (nats)")
        if key == "by_position":
            edges = [row["first"] for row in rows] + [rows[-1]["last"] + 1]
            axes.stairs([row["loss"] for row in rows], edges, baseline=None)
            axes.set(xlabel="tokens before")
            axes.set(title=f"loss by position, {rows[0]['tokens']:,} documents")
        elif key == "by_context":
            axes.plot([row["context"] for row in rows], [row["loss"] for row in rows], marker="o")
            axes.set(xlabel="context", title=f"the same {rows[0]['tokens']:,} tokens")
        else:
            pairs = [(row["tokens"], row["bits_per_byte"]) for row in rows if row["tokens"]]
            scored = [pair for pair in pairs if math.isfinite(pair[1])]
            axes.scatter(*np.transpose(scored or np.empty((0, 2))), s=8, alpha=0.6)
            axes.set(xlabel="tokens of the document", ylabel="bits per byte")
            axes.set(title=f"{len(scored):,} documents")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    total = content["total"]["perplexity"]
    shown = f"{total:,.3f}" if math.isfinite(total) else "beyond what a float holds"
    figure.suptitle(f"perplexity {shown}")
    return figure


def draw_grids(drawn: Sequence[Grid]) -> Figure:
    """Draw each grid as a heat map: lengths across, names down."""
    widest = max(len(grid.lengths) for grid in drawn)
    tallest = max(len(grid.names) for grid in drawn)
    size = (3 + 0.7 * widest) * len(drawn), 1.5 + 0.28 * tallest
    figure = Figure(figsize=size, layout="constrained")
    for axes, grid in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        heat_map(axes, grid)
    return figure


def heat_map(axes: Any, grid: Grid) -> None:
    """Draw the shares of a grid, each with its percent."""
    axes.set(xlabel="tokens", title=grid.title)
    axes.imshow(grid.shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(grid.shares):
        for x, share in enumerate(row):
            ink = "black" if 0.2 < share < 0.9 else "white"  # on dark red and dark green
            axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_xticks(range(len(grid.lengths)), [f"{n:,}" for n in grid.lengths], rotation=45)
    axes.set_yticks(range(len(grid.names)), grid.names)
