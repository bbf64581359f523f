"""The results of an evaluation: tables on the terminal, a JSON, and a copy at wandb.

All of them are made from the content of the JSON. A perplexity has "documents", pass keys have
"kinds", RULER has "ruler", and tasks of lm-evaluation-harness have "results".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from longctx import files, tables
from longctx.config.train_config import WandbConfig
from longctx.evaluation.load import TrainedModel
from longctx.runs import evaluations
from longctx.runs.tracking import log_evaluation
from longctx.runs.wandb_copy import wandb_mode

SHOWN = 4  # best documents of a long table, and as many of the worst
Content = dict[str, Any]


def save(content: Content, stem: str, model: TrainedModel, wandb: str) -> Path:
    """Write the JSON, send it to wandb if asked for, and return its path.

    The file of an earlier evaluation with the same keys is replaced; one with others stays. wandb
    goes to the project and group of the run. If it fails, the file is there, and a line on stderr
    says so.
    """
    path = evaluations.path_for(model.home / evaluations.FOLDER, stem, content["asked"])
    evaluations.write(content, path)
    if wandb_mode(WandbConfig(mode=wandb)) == "disabled":
        return path
    try:
        settings = replace(WandbConfig(**(model.run or {}).get("wandb", {})), mode=wandb)
        log_evaluation(settings, model.home, content)
    except Exception as error:  # wandb's own errors, the network's, the disk's
        print(f"wandb is off: {files.one_line(error)}", file=sys.stderr)
    return path


def show(content: Content) -> None:
    """Print the tables of an evaluation."""
    if "total" in content:
        show_perplexity(content)
    elif "results" in content:
        scores = evaluations.task_scores(content["results"])
        show_rows("lm-evaluation-harness", scores, {"value": ".4f", "error": ".4f"})
    elif "ruler" in content:
        lengths, by_task = evaluations.ruler_rows(content)
        show_shares("RULER: score by task", lengths, by_task.items())
    else:
        for kind, grid in content["kinds"].items():
            depths = [*map(percent, grid["depths"]), "mean"]
            shares = [*zip(*grid["accuracy"], strict=True), [*map(fmean, grid["accuracy"])]]
            title = f"{kind}: right answers by depth"
            show_shares(title, grid["lengths"], zip(depths, shares, strict=True))


def show_shares(
    title: str, lengths: Iterable[int], rows: Iterable[tuple[str, Sequence[float]]]
) -> None:
    """Print shares, 0 to 1, as percents: a column for each length, and rows with a name."""
    headings = ["tokens", *map("{:,}".format, lengths)]
    cells = [[name, *map(percent, shares)] for name, shares in rows]
    tables.show(title, headings, cells)


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def show_rows(title: str, rows: Sequence[Content], forms: dict[str, str]) -> None:
    """Print the columns that the first of `rows` has; `forms` are formats of some numbers."""
    written = []
    for row in rows:
        known = {name: form for name, form in forms.items() if row.get(name) is not None}
        written.append(row | {name: format(row[name], form) for name, form in known.items()})
    tables.grid(title, list(rows[0]) if rows else [], written)


def show_perplexity(content: Content) -> None:
    """Print documents, loss by position and loss over context; then the sums, time and memory."""
    scored = [row for row in content["documents"] if row["tokens"]]
    scored.sort(key=lambda row: row["perplexity"])
    title = f"windows of {content['context']:,} tokens, one every {content['stride']:,}"
    # A data set has thousands of documents: a few say enough, and the JSON has them all.
    if len(scored) > 2 * SHOWN:
        title += f": best and worst of {len(scored):,} documents"
        scored = scored[:SHOWN] + scored[-SHOWN:]
    forms = {"nats": ",.1f", "loss": ".4f", "perplexity": ",.3f"}
    forms |= {"gain": ".4f", "bits_per_byte": ".4f"}
    show_rows(title, scored, forms)
    titles = {"by_position": "loss by position", "gain_by_position": "gain by position"}
    titles |= {"by_context": "the same tokens with shorter contexts"}
    titles |= {"gains": "gain over the short context: best and worst"}
    for key, title in titles.items():
        if content.get(key):
            show_rows(title, content[key], forms)
    total = content["total"]
    # The standard error is of the loss, so it counts times the perplexity.
    error = total["perplexity"] * total["standard_error"]
    documents = tables.count_of(len(content["documents"]), "document")
    print(
        f"perplexity {total['perplexity']:,.3f} ± {error:,.3f}, {total['bits_per_byte']:.4f} bits "
        f"per byte, {total['tokens']:,} tokens of all {documents}"
    )
    speed, memory = content["tokens_per_second"], content["memory_peak_gib"]
    parts = [f"{content['seconds']:,.1f} s"]
    parts += [f"{speed:,.0f} tokens/s through the model after the first batch"] if speed else []
    parts += [f"{memory:.1f} GiB"] if memory else []
    print(", ".join(parts))
