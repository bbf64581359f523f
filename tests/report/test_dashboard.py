"""The workspace shows what is logged."""

import json

import pytest

from longctx.report import dashboard


def test_a_refusal_is_one_line(monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(dashboard, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install wandb-workspaces"):
        dashboard.dashboard("p")
    monkeypatch.setattr(dashboard, "find_spec", lambda name: True)
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    with pytest.raises(ValueError, match=r"^project=p: .*wandb login"):
        dashboard.dashboard("p")

    def refuse(**_: object) -> bool:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(wandb, "login", refuse)
    with pytest.raises(ValueError, match=r"^project=p: .*no route$"):
        dashboard.dashboard("p")


def test_the_workspace_is_the_plan():
    """wandb-workspaces checks every panel as it is made; what is saved holds all of them."""
    pytest.importorskip("wandb_workspaces")
    spec = dashboard.workspace("p", "e", "n")._to_model().model_dump()["spec"]
    saved = {
        section["name"]: section["panels"]
        for section in spec["section"]["panel_bank_config"]["sections"]
    }
    for title, charts in dashboard.sections().items():
        for chart, panel in zip(charts, saved[title], strict=True):
            key = chart.y[0].removesuffix(".min").removesuffix(".last")
            assert key in json.dumps(panel, default=str)
    kinds = {"Run History Line Plot", "Scatter Plot", "Bar Chart"}
    assert {panel["view_type"] for panels in saved.values() for panel in panels} == kinds
