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
from typing import Any

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
    shows = {"ruler": show_ruler, "kinds": show_passkeys, "results": show_tasks}
    next((show for key, show in shows.items() if key in content), show_perplexity)(content)


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


def show_tasks(content: Content) -> None:
    """Print the scores of lm-evaluation-harness."""
    columns = {"task": "{task}", "metric": "{metric}", "value": "{value:,.4f}"}
    columns["± standard error"] = "{error:,.4f}"
    rows = evaluations.task_scores(content["results"])
    tables.show(table("lm-evaluation-harness", columns, rows), keys=2)


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


def show_passkeys(content: Content) -> None:
    """Print a table of each kind: depths down, lengths across, the share of right answers."""
    for kind, grid in content["kinds"].items():
        by_depth = zip(grid["depths"], zip(*grid["accuracy"], strict=True), strict=True)
        rows = [[f"{depth:.0%}", *map("{:.0%}".format, shares)] for depth, shares in by_depth]
        rows.append(["mean", *(f"{fmean(shares):.0%}" for shares in grid["accuracy"])])
        headings = ["depth", *map("{:,}".format, grid["lengths"])]
        title = f"{kind}: right answers, by depth and tokens"
        tables.show(tables.text_table(title, headings, rows))


def show_ruler(content: Content) -> None:
    """Print a table of tasks and lengths, and which data are not RULER's own."""
    lengths, scores = evaluations.ruler_rows(content)
    rows = [[task, *(f"{100 * share:.1f}" for share in of)] for task, of in scores.items()]
    headings = ["task", *map("{:,}".format, lengths)]
    tables.show(tables.text_table("RULER, score by task and tokens (%)", headings, rows))
    if any(TASKS[task].essay for task in content["ruler"]["scores"]):
        print("essays are your own text, where RULER has Paul Graham's")
    if content["made"]:
        tasks = " and ".join(content["made"])
        print(f"{tasks}: questions made from your own text, not RULER's data")


def draw(content: Content, path: Path) -> Path | None:
    """Write a PNG to `path` and return it; None for tasks, which have no picture."""
    if "results" in content:
        return None
    drawings = {"ruler": draw_ruler, "kinds": draw_passkeys}
    draw_kind = next((draw for key, draw in drawings.items() if key in content), draw_perplexity)
    with files.atomic(path) as partial:
        draw_kind(content).savefig(partial, dpi=120)
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


def draw_passkeys(content: Content) -> Figure:
    """Draw a heat map of each kind."""
    kinds = content["kinds"]
    widest = max(len(grid["lengths"]) for grid in kinds.values())
    figure = Figure(figsize=((2.5 + 0.7 * widest) * len(kinds), 4), layout="constrained")
    for number, (kind, grid) in enumerate(kinds.items(), start=1):
        image = recall_map(figure.add_subplot(1, len(kinds), number), grid, kind)
    figure.colorbar(image, ax=figure.axes, label="right answers")
    return figure


def recall_map(axes: Any, grid: Content, title: str) -> Any:
    """Draw one kind of pass keys: lengths across, depths down; return the image."""
    by_depth = list(zip(*grid["accuracy"], strict=True))
    names = [f"{depth:.0%}" for depth in grid["depths"]]
    axes.set(xlabel="tokens", ylabel="depth of the key", title=title)
    return heat_map(axes, by_depth, grid["lengths"], names)


def draw_ruler(content: Content) -> Figure:
    """Draw the table of tasks and lengths."""
    lengths, scores = evaluations.ruler_rows(content)
    size = 3.2 + 0.8 * len(lengths), 1.5 + 0.28 * len(scores)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    heat_map(axes, list(scores.values()), lengths, list(scores))
    axes.set(xlabel="tokens", title="RULER, score (%)")
    return figure


def heat_map(
    axes: Any, rows: Sequence[Sequence[float]], lengths: Sequence[int], names: Sequence[str]
) -> Any:
    """Draw `rows` of shares, 0 to 1, over `lengths`, each with its percent; return the image."""
    image = axes.imshow(rows, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for x, share in enumerate(row):
            ink = "black" if 0.2 < share < 0.9 else "white"  # on dark red and dark green
            axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(names)), names)
    return image
