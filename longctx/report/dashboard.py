"""The wandb workspace for the runs of a project. The only user of wandb-workspaces.

It has the panels of the table of metrics (`longctx.runs.metrics`) and the panels of FIXED, which
do not show metrics over tokens.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

from longctx import untrusted
from longctx.runs import metrics
from longctx.runs.metrics import Shown

TOKENS = "tokens_seen"


class Chart(NamedTuple):
    """One panel of the workspace.

    `kind` is lines over tokens seen; shares: lines stacked on each other; points: a summary value
    of each run over a value of its configuration; bars: a summary value of each run.
    """

    kind: str
    title: str
    y: tuple[str, ...]
    x: str = TOKENS
    log: bool = False


FIXED: dict[str, tuple[Chart, ...]] = {
    "Context extension": (
        Chart("points", "Perplexity over context (eval.py)", ("eval/perplexity",), "context"),
    ),
    "Throughput": (),
    "Memory": (),
    "Loss": (),
    "Evaluation": (
        Chart("bars", "Perplexity", ("eval/perplexity",)),
        Chart("bars", "Bits per byte", ("eval/bits_per_byte",)),
    ),
}


def sections() -> dict[str, list[Chart]]:
    """Return the panels of every section: metrics over the context, the fixed ones, metrics over
    tokens.
    """
    result: dict[str, list[Chart]] = {}
    over_context = metrics.shown(Shown.CONTEXT)
    for title, fixed in FIXED.items():
        points = [
            Chart("points", f"{metric.panel.title} over context", (over(metric),), "seq_len")
            for metric in over_context
            if metric.panel is not None and metric.panel.section == title
        ]
        result[title] = [*points, *fixed]
    panels = dict.fromkeys(metric.panel for metric in metrics.METRICS if metric.panel is not None)
    for panel in panels:
        keys = tuple(
            metric.key.replace("*", ".*") for metric in metrics.METRICS if metric.panel == panel
        )
        chart = Chart(panel.kind, panel.title, keys, log=panel.log)
        result.setdefault(panel.section, []).append(chart)
    return result


def over(metric: metrics.Metric) -> str:
    """Return the key of the one value of a run in its summary at wandb: the least or the last.

    The summary has `key.last` beside the extreme that it keeps, and then no `key` alone.
    """
    ending = {"min": ".min", "max": ".last", None: ""}[metric.summary]
    return f"{metric.key}{ending}"


def columns() -> list[str]:
    """Return the columns of the table of runs: two keys and the metrics over the context."""
    figures = [f"summary:{over(metric)}" for metric in metrics.shown(Shown.CONTEXT)]
    return ["config:backend", "config:seq_len", *figures]


def dashboard(project: str, entity: str | None = None, name: str = "longctx") -> None:
    """Create the workspace and print its address.

    Raises ValueError, one line, if wandb-workspaces or an API key is missing, or the server
    refuses.
    """
    if find_spec("wandb_workspaces") is None:
        raise ValueError(
            "dashboard: wandb-workspaces is not installed; pip install wandb-workspaces"
        )
    import wandb

    # wandb's own errors, the network's
    problem = "wandb did not take the workspace: {}"
    with untrusted.named(f"project={project}", problem, (Exception,)):
        if not wandb.login(prompt=False):
            raise ValueError("wandb has no API key here; give one by `wandb login`")
        entity = entity or str(wandb.Api().default_entity)
        created = workspace(project, entity, name)
        created.save()
    print(created.url)


def workspace(project: str, entity: str, name: str) -> Any:
    """Return the workspace, not yet saved."""
    import wandb_workspaces.workspaces as ws

    filled = [
        ws.Section(name=title, panels=[_panel(panel) for panel in panels], is_open=True)
        for title, panels in sections().items()
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=filled,
        settings=ws.WorkspaceSettings(x_axis=TOKENS, max_runs=20),
        runset_settings=ws.RunsetSettings(pinned_columns=columns()),
    )


def _panel(panel: Chart) -> Any:
    import wandb_workspaces.reports.v2 as wr

    if panel.kind in ("lines", "shares"):
        more: dict[str, Any] = {"plot_type": "stacked-area"} if panel.kind == "shares" else {}
        more |= {"metric_regex": panel.y[0]} if "*" in panel.y[0] else {"y": list(panel.y)}
        return wr.LinePlot(title=panel.title, x=panel.x, log_y=panel.log, **more)
    if panel.kind == "points":
        axes: dict[str, Any] = {"x": wr.Config(panel.x), "y": wr.SummaryMetric(panel.y[0])}
        return wr.ScatterPlot(title=panel.title, **axes, log_x=True, log_y=panel.log)
    return wr.BarPlot(title=panel.title, metrics=[wr.SummaryMetric(key) for key in panel.y])
