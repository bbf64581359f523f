"""The workspace shows what is logged."""

import json
import sys

import pytest

from longctx.report import dashboard
from longctx.runs import metrics
from longctx.runs.metrics import EVERYWHERE, Metric

NEW = Metric("pages_per_hour", "reading", shown=EVERYWHERE, better="max", of_run="median")


def test_a_refusal_is_one_line(monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ValueError, match=r"^project=p: .*wandb-workspaces .*wandb_workspaces"):
        dashboard.dashboard("p", "me")
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    with pytest.raises(ValueError, match=r"^project=p: .*wandb login"):
        dashboard.dashboard("p")


def test_the_workspace_has_every_metric_once_over_tokens(monkeypatch):
    """wandb-workspaces checks every panel as it is made; what is saved holds all of them."""
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, NEW))
    spec = dashboard.workspace("p", "e", "n")._to_model().model_dump()["spec"]
    saved = {
        section["name"]: section["panels"]
        for section in spec["section"]["panel_bank_config"]["sections"]
    }
    panels = [panel for section in saved.values() for panel in section]
    kinds = {"Run History Line Plot", "Scatter Plot", "Bar Chart"}
    assert {panel["view_type"] for panel in panels} == kinds
    titles = [
        key
        for panel in panels
        if panel["view_type"] == "Run History Line Plot"
        for key in panel["config"]["chart_title"].split(", ")
    ]
    families = {f"{metrics.BY_POSITION}/*", f"{metrics.FACTS_FOUND}/*"}
    shown = {x.key for x in metrics.METRICS if not x.hidden} - {"step"} | families
    assert sorted(titles) == sorted(shown)
    assert "pages_per_hour.last" in json.dumps(saved["Context extension"], default=str)
    assert "summary:pages_per_hour.last" in json.dumps(spec, default=str)
