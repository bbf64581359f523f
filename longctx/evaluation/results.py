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

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from longctx import files, tables
from longctx.config.train_config import WandbConfig
from longctx.evaluation.load import TrainedModel
from longctx.evaluation.ruler import TASKS
from longctx.runs import evaluations
from longctx.runs.tracking import log_evaluation, wandb_mode

SHOWN = 3  # documents in each group of a long table
GAINS_SHOWN = 5
Content = dict[str, Any]


def save(content: Content, stem: str, model: TrainedModel, wandb: str) -> Path:
    """Write the JSON and the picture, send both to wandb if asked for, and return the JSON's path.

    The file of an earlier evaluation with the same keys is replaced; one with others stays. wandb
    goes to the project and group of the run. If it fails, the files are there, and a line on stderr
    says so.
    """
    path = evaluations.place(model.home / evaluations.FOLDER, stem, content["asked"])
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
        print(f"wandb is off: {' '.join(str(error).split())}", file=sys.stderr)
    return path


def show(content: Content) -> None:
    """Print the tables of an evaluation."""
    if "ruler" in content:
        show_ruler(content)
    elif "kinds" in content:
        show_passkeys(content)
    elif "results" in content:
        rows = [
            (task, metric, f"{value:,.4f}", "" if error is None else f"{error:,.4f}")
            for task, metric, value, error in evaluations.task_scores(content["results"])
        ]
        headings = ["task", "metric", "value", "± standard error"]
        tables.show(table("lm-evaluation-harness", headings, rows, left=2), keys=2)
    else:
        for view in perplexity_tables(content):
            if view.row_count:
                tables.show(view)
        speed, memory = content["tokens_per_second"], content["memory_peak_gib"]
        parts = [f"{content['seconds']:,.1f} s"]
        parts += [f"{speed:,.0f} tokens/s through the model after the first batch"] if speed else []
        parts += [f"{memory:.1f} GiB"] if memory else []
        print(", ".join(parts))


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]] = (), left: int = 0
) -> Table:
    """Return a table of `rows`; the first `left` columns are text, and numbers are to the right."""
    view = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        is_text = number < left or heading in ("in its text", "document")
        # Only long texts are broken into lines.
        overflow: Any = "fold" if heading in ("in its text", "document") else "ellipsis"
        view.add_column(heading, justify="left" if is_text else "right", overflow=overflow)
    for row in rows:
        view.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return view


def perplexity_tables(content: Content) -> list[Table]:
    """Return documents, loss by position, loss over context, and the tokens that gain most."""
    positions, contexts = content["by_position"], content["by_context"]
    documents = positions[0]["tokens"] if positions else 0
    by_position = table(
        f"loss by position, {documents:,} documents",
        ["tokens before", "tokens", "loss"],
        [
            (
                f"{row['first']:,} – {row['last']:,}" if row["last"] > 1 else "1",
                f"{row['tokens']:,}",
                f"{row['loss']:.4f}",
            )
            for row in positions
        ],
    )
    if not contexts:
        return [documents_table(content), by_position]
    shortest, longest = contexts[0], contexts[-1]
    by_context = table(
        f"the same {longest['tokens']:,} tokens of {longest['documents']:,} documents",
        ["context", "loss", "perplexity", "gain (nats)"],
        [
            (
                f"{row['context']:,}",
                f"{row['loss']:.4f}",
                f"{row['perplexity']:,.3f}",
                f"{row['gain']:.4f}",
            )
            for row in contexts
        ],
    )
    gains = table(
        f"gain most from {shortest['context']:,} → {longest['context']:,} tokens of context",
        ["loss", "", "in its text", "document"],
        [
            (f"{row['short']:.2f}", f"→ {row['long']:.2f}", in_text(row), row["document"])
            for row in content["gains"][:GAINS_SHOWN]
        ],
    )
    return [documents_table(content), by_position, by_context, gains]


def in_text(gain: Content) -> Text:
    """Return a token in bold, between the text before and after it."""
    before, token, after = (gain[key].replace("\n", "⏎") for key in ("before", "token", "after"))
    return Text.assemble(before[-50:], (f"⟦{token}⟧", "bold"), after[:20])


def documents_table(content: Content) -> Table:
    """Return every document, or the longest, best and worst of many, and the sums over all."""
    headings = ["document", "tokens", "bytes", "perplexity", "word perplexity", "bits per byte"]
    view = table(f"context {content['context']:,}, stride {content['stride']:,}", headings)
    scored = [row for row in content["documents"] if row["tokens"]]
    by_perplexity = sorted(scored, key=lambda row: row["perplexity"])
    groups = {"": by_perplexity}
    if len(scored) > 3 * SHOWN:
        groups = {
            "longest": sorted(scored, key=lambda row: -row["tokens"])[:SHOWN],
            "best": by_perplexity[:SHOWN],
            "worst": by_perplexity[-SHOWN:],
        }
    for heading, rows in groups.items():
        if heading:
            view.add_row(Text(heading, "dim"))
        for row in rows:
            view.add_row(*_document_cells(row))
        view.add_section()
    total = content["total"]
    cells = _document_cells(total)
    # The standard error is of the loss, so it counts times the perplexity.
    if not math.isnan(total["standard_error"]):
        cells[3] += f" ± {total['perplexity'] * total['standard_error']:,.3f}"
    view.add_row(*cells, style="bold")
    return view


def _document_cells(row: Content) -> list[Any]:
    bits, words = row["bits_per_byte"], row["word_perplexity"]
    return [
        row["name"],
        f"{row['tokens']:,}",
        f"{row['bytes']:,}",
        f"{row['perplexity']:,.3f}",
        "" if math.isnan(words) else f"{words:,.4g}",
        "" if math.isnan(bits) else f"{bits:.4f}",
    ]


def show_passkeys(content: Content) -> None:
    """Print a table of each kind: depths down, lengths across, the share of right answers."""
    for kind, grid in content["kinds"].items():
        print(f"{kind}: right answers, by depth and tokens")
        by_depth = zip(*grid["accuracy"], strict=True)
        rows = [
            [f"{depth:.0%}", *(f"{share:.0%}" for share in shares)]
            for depth, shares in zip(grid["depths"], by_depth, strict=True)
        ]
        view = table("", ["depth", *(f"{length:,}" for length in grid["lengths"])], rows)
        view.title = None
        view.add_section()
        view.add_row("mean", *(f"{fmean(shares):.0%}" for shares in grid["accuracy"]), style="bold")
        tables.show(view)


def show_ruler(content: Content) -> None:
    """Print a table of tasks and lengths, and what is not RULER's own data."""
    lengths, scores = evaluations.ruler_rows(content)
    headings = ["task", *(f"{length:,}" for length in lengths)]
    view = table("RULER, score by task and tokens (%)", headings, left=1)
    for task, shares in scores.items():
        if task == "mean":
            view.add_section()
        cells = (f"{100 * share:.1f}" for share in shares)
        view.add_row(task, *cells, style="bold" if task == "mean" else None)
    tables.show(view)
    if any(TASKS[task].essay for task in content["ruler"]["scores"]):
        print("essays are your own text, where RULER has Paul Graham's")
    if content["made"]:
        tasks = " and ".join(content["made"])
        print(f"{tasks}: questions made from your own text, not RULER's data")


def draw(content: Content, path: Path) -> Path | None:
    """Write a PNG to `path` and return it; None for tasks, which have no picture."""
    if "results" in content:
        return None
    if "ruler" in content:
        figure = draw_ruler(content)
    elif "kinds" in content:
        figure = draw_passkeys(content)
    else:
        figure = draw_perplexity(content)
    with files.atomic(path) as partial:
        figure.savefig(partial, dpi=120)
    return path


def draw_perplexity(content: Content) -> Figure:
    """Draw loss by position, loss over context, and documents, if there are any of them."""
    panels = {"by_position": _positions, "by_context": _contexts, "documents": _documents}
    panels = {key: panel for key, panel in panels.items() if content[key]}
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for number, panel in enumerate(panels.values(), start=1):
        axes = figure.add_subplot(1, len(panels), number)
        panel(axes, content)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    total = content["total"]["perplexity"]
    shown = f"{total:,.3f}" if math.isfinite(total) else "beyond what a float holds"
    figure.suptitle(f"perplexity {shown}")
    return figure


def _positions(axes: Any, content: Content) -> None:
    rows = content["by_position"]
    edges = [row["first"] for row in rows] + [rows[-1]["last"] + 1]
    axes.stairs([row["loss"] for row in rows], edges, baseline=None)
    title = f"loss by position, {rows[0]['tokens']:,} documents"
    axes.set(xlabel="tokens before", ylabel="loss (nats)", title=title)


def _contexts(axes: Any, content: Content) -> None:
    rows = content["by_context"]
    axes.plot([row["context"] for row in rows], [row["loss"] for row in rows], marker="o")
    axes.set(xlabel="context", ylabel="loss (nats)", title=f"the same {rows[0]['tokens']:,} tokens")


def _documents(axes: Any, content: Content) -> None:
    scored = [
        (row["tokens"], row["bits_per_byte"])
        for row in content["documents"]
        if row["tokens"] and math.isfinite(row["bits_per_byte"])
    ]
    axes.scatter([tokens for tokens, _ in scored], [bits for _, bits in scored], s=8, alpha=0.6)
    title = f"{len(scored):,} documents"
    axes.set(xlabel="tokens of the document", ylabel="bits per byte", title=title)


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
