"""A wandb workspace for runs of longctx, made by command. The only user of wandb-workspaces.

What it shows stands in SECTIONS, by the names under which `longctx.training` logs; a dry run prints
that and sends nothing.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any, NamedTuple

TOKENS = "tokens_seen"


class Panel(NamedTuple):
    """`kind`: lines over tokens seen; shares, the same stacked; points, a summary value of each run
    over a value of its configuration; bars, a summary value of each run; table, a plot of a logged
    table (x, y, line); pictures.
    """

    kind: str
    title: str
    y: tuple[str, ...]
    x: str = TOKENS
    log: bool = False


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Context extension": (
        Panel("points", "Validation loss over context", ("val_loss.min",), "seq_len"),
        Panel("points", "Perplexity over context (eval.py)", ("eval/perplexity",), "context"),
        Panel(
            "table",
            "Loss by position",
            ("loss_by_position_table", "tokens before", "loss", "tokens seen"),
        ),
        Panel(
            "table",
            "The same tokens over context",
            ("eval/loss_by_context_table", "tokens of context", "loss", "run"),
        ),
        Panel("lines", "Loss at each position", ("val_loss_by_position/.*",)),
        Panel("lines", "Facts found again", ("facts_found/.*",)),
    ),
    "Throughput": (
        Panel("lines", "Tokens per second", ("tokens_per_second",)),
        Panel("lines", "MFU", ("mfu",)),
        Panel("points", "Tokens per second over context", ("tokens_per_second",), "seq_len"),
        Panel(
            "shares",
            "Parts of a step (ms)",
            ("forward_ms", "backward_ms", "optimizer_ms", "data_wait_ms"),
        ),
        Panel("lines", "Time per step (ms)", ("ms_per_step",)),
        Panel("lines", "Padding", ("padding_share",)),
    ),
    "Memory": (
        Panel(
            "lines",
            "Peak memory (GiB)",
            ("memory_peak_gib", "memory_reserved_gib", "memory_predicted_gib"),
        ),
        Panel("points", "Peak memory over context", ("memory_peak_gib",), "seq_len"),
        Panel("lines", "Peak memory of the process (GiB)", ("process_peak_gib",)),
    ),
    "Loss": (
        Panel("lines", "Loss", ("loss",), log=True),
        Panel("lines", "Validation loss", ("val_loss",)),
        Panel("lines", "Validation perplexity", ("val_perplexity",), log=True),
        Panel("lines", "Gradient norm", ("grad_norm",), log=True),
        Panel("lines", "Learning rate", ("lr",)),
    ),
    "Evaluation": (
        Panel("bars", "Perplexity", ("eval/perplexity",)),
        Panel("bars", "Word perplexity", ("eval/word_perplexity",)),
        Panel("bars", "Bits per byte", ("eval/bits_per_byte",)),
        Panel(
            "table",
            "Loss by position",
            ("eval/loss_by_position_table", "tokens of position", "loss", "run"),
        ),
        Panel("pictures", "Pictures of eval.py", ("eval/picture",)),
    ),
}
COLUMNS = ["config:backend", "config:seq_len", "summary:val_loss.min", "summary:tokens_per_second"]


def dashboard(
    project: str, entity: str | None = None, name: str = "longctx", dry_run: bool = False
) -> None:
    """Make the workspace `name` in `project` of `entity` (your default) and print its address;
    without an API key, or with `dry_run`, print as JSON what it would show.

    Raises ValueError, one line, where wandb-workspaces is missing or the server refuses.
    """
    if dry_run:
        print(json.dumps(plan(project, entity, name), indent=1))
        return
    require()
    import wandb

    try:
        if not wandb.login(prompt=False):
            print(json.dumps(plan(project, entity, name), indent=1))
            print(
                "nothing was sent: wandb has no API key here; after `wandb login`, the same again",
                file=sys.stderr,
            )
            return
        made = workspace(project, entity or str(wandb.Api().default_entity), name)
        made.save()
    except Exception as error:  # wandb's own errors, the network's
        raise ValueError(f"project={project}: wandb did not take the workspace: {error}") from error
    print(made.url)


def plan(project: str, entity: str | None, name: str) -> dict[str, Any]:
    """What the workspace shows, as plain values."""
    sections = [
        {"name": title, "panels": [{**panel._asdict(), "y": list(panel.y)} for panel in panels]}
        for title, panels in SECTIONS.items()
    ]
    return {
        "project": project,
        "entity": entity,
        "name": name,
        "columns": COLUMNS,
        "sections": sections,
    }


def require() -> None:
    """Raise ValueError where wandb-workspaces is not installed."""
    if find_spec("wandb_workspaces") is None:
        raise ValueError(
            "dashboard: wandb-workspaces is not installed; pip install 'longctx[dashboard]'"
        )


def workspace(project: str, entity: str, name: str) -> Any:
    """The workspace, not yet saved."""
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=title, panels=[_panel(panel) for panel in panels], is_open=True)
        for title, panels in SECTIONS.items()
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=TOKENS, max_runs=20),
        runset_settings=ws.RunsetSettings(pinned_columns=COLUMNS),
    )


def _panel(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    if panel.kind in ("lines", "shares"):
        more: dict[str, Any] = {"plot_type": "stacked-area"} if panel.kind == "shares" else {}
        more |= {"metric_regex": panel.y[0]} if "*" in panel.y[0] else {"y": list(panel.y)}
        return wr.LinePlot(title=panel.title, x=panel.x, log_y=panel.log, **more)
    if panel.kind == "points":
        axes: dict[str, Any] = {"x": wr.Config(panel.x), "y": wr.SummaryMetric(panel.y[0])}
        return wr.ScatterPlot(title=panel.title, **axes, log_x=True, log_y=panel.log)
    if panel.kind == "bars":
        return wr.BarPlot(title=panel.title, metrics=[wr.SummaryMetric(key) for key in panel.y])
    if panel.kind == "table":
        fields = dict(zip(("x", "y", "stroke"), panel.y[1:], strict=True))
        made = wr.CustomChart.from_table(
            panel.y[0], chart_fields=fields, chart_strings={"title": panel.title}
        )
        made.chart_name = "wandb/line/v0"
        return made
    return wr.MediaBrowser(title=panel.title, media_keys=list(panel.y))
