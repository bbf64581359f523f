"""The wandb workspace for the runs of a project. The only user of wandb-workspaces.

Every metric of the table (`longctx.runs.metrics`) has a panel over tokens: in the section that
PANELS gives it, or else in the last one, so a new metric needs no line here.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from longctx import untrusted
from longctx.runs import metrics
from longctx.runs.metrics import BY_POSITION, FACTS_FOUND, Shown

TOKENS = "tokens_seen"
LOG = ("loss", "val_perplexity", "grad_norm")
STEP_PARTS = ("forward_ms", "backward_ms", "optimizer_ms", "data_wait_ms")  # stacked
SCORES = ("eval/perplexity", "eval/bits_per_byte")
PEAK = ("memory_peak_gib", "memory_reserved_gib", "memory_predicted_gib")
# Section → its panels, each of the keys that are drawn together
PANELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Context extension": ((f"{BY_POSITION}/*",), (f"{FACTS_FOUND}/*",)),
    "Throughput": (("tokens_per_second",), ("ms_per_step",), ("mfu",), STEP_PARTS),
    "Memory": (PEAK, ("process_peak_gib",)),
    "Loss": (("loss",), ("val_loss",), ("val_perplexity",), ("grad_norm",), ("lr",)),
    "Several devices": (("tokens_per_second_per_device",), ("communication_ms",)),
}


def dashboard(project: str, entity: str | None = None, name: str = "longctx") -> None:
    """Create the workspace and print its address; ValueError, one line, if wandb-workspaces or an
    API key is missing, or the server refuses.
    """
    import wandb

    # Also wandb's own errors, the network's, and a missing package
    problem = "no workspace, for which wandb wants wandb-workspaces and an API key: {}"
    with untrusted.named(f"project={project}", problem, (Exception,)):
        if not wandb.login(prompt=False):
            raise ValueError("wandb has no API key here; give one by `wandb login`")
        created = workspace(project, entity or str(wandb.Api().default_entity), name)
        created.save()
    print(created.url)


def workspace(project: str, entity: str, name: str) -> Any:
    """Return the workspace, not yet saved: panels over tokens, and a point or bar for each run."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def lines(keys: tuple[str, ...]) -> Any:
        family = {"metric_regex": keys[0].replace("*", ".*")}
        more: dict[str, Any] = family if "*" in keys[0] else {"y": list(keys)}
        more |= {"plot_type": "stacked-area"} if keys == STEP_PARTS else {}
        return wr.LinePlot(title=", ".join(keys), x=TOKENS, log_y=keys[0] in LOG, **more)

    def points(title: str, y: str, x: str) -> Any:
        axes: dict[str, Any] = {"x": wr.Config(x), "y": wr.SummaryMetric(y)}
        return wr.ScatterPlot(title=f"{title} over context", **axes, log_x=True)

    placed = {TOKENS, "step", *chain(*chain(*PANELS.values()))}
    rest = [(x.key,) for x in metrics.METRICS if not x.hidden and x.key not in placed]
    panels = {title: list(map(lines, keys)) for title, keys in {**PANELS, "More": rest}.items()}
    # The summary has `key.last` beside the extreme that it keeps, and then no `key` alone
    ends = {"min": ".min", "max": ".last", None: ""}
    over = {x.heading: x.key + ends[x.summary] for x in metrics.shown(Shown.CONTEXT)}
    panels["Context extension"] += [points(title, over[title], "seq_len") for title in over]
    bars = [wr.BarPlot(title=x, metrics=[wr.SummaryMetric(x)]) for x in SCORES]
    panels["Evaluation"] = [points("Perplexity", SCORES[0], "context"), *bars]
    columns = ["config:backend", "config:seq_len", *(f"summary:{key}" for key in over.values())]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[ws.Section(name=x, panels=panels[x], is_open=True) for x in panels],
        settings=ws.WorkspaceSettings(x_axis=TOKENS, max_runs=20),
        runset_settings=ws.RunsetSettings(pinned_columns=columns),
    )
