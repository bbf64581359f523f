"""The workspace shows what is logged; a dry run needs neither a key nor the package, and sends
nothing.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longctx.cli import main
from longctx.report import dashboard

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "words",
    [["project=p", "dry_run=true"], ["dry_run=true", "project=p"]],
)
def test_a_dry_run_prints_the_plan(capsys, words):
    assert main(["dashboard", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["project"] == "p"
    names = [section["name"] for section in plan["sections"]]
    assert names == ["Context extension", "Throughput", "Memory", "Loss", "Evaluation"]
    assert all(section["panels"] for section in plan["sections"])


def test_a_dry_run_loads_no_wandb():
    code = (
        "import sys; from longctx.cli import main; "
        "main(['dashboard', 'project=p', 'dry_run=true']); assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_without_a_key_the_plan_is_printed_and_said_to_be_one(capsys, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(dashboard, "require", lambda: None)
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    assert main(["dashboard", "project=p", "entity=e"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["entity"] == "e"
    assert "nothing was sent" in captured.err


def test_what_goes_wrong_is_one_line(capsys, refused, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(dashboard, "find_spec", lambda name: None)
    assert main(["dashboard", "project=p"]) == 2
    assert "pip install 'longctx[dashboard]'" in capsys.readouterr().err
    monkeypatch.setattr(dashboard, "find_spec", lambda name: True)

    def refuse(**_: object) -> bool:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(wandb, "login", refuse)
    for words, said in [
        (["project=p"], "project=p: wandb did not take the workspace: no route"),
        ([], "project=longctx"),
        (["project="], "project=longctx"),
        (["--project=p"], "write project=p"),
        (["project=p", "project=q"], "project=p is given too"),
        (["projekt=p"], "did you mean project?"),
        (["project"], "project: not of the form key=value"),
        (["project=p", "dry_run=maybe"], "dry_run=maybe"),
    ]:
        refused(main(["dashboard", *words]), said)


def test_the_workspace_is_the_plan():
    """wandb-workspaces checks every panel as it is made; what is saved holds all of them."""
    pytest.importorskip("wandb_workspaces")
    spec = dashboard.workspace("p", "e", "n")._to_model().model_dump()["spec"]
    sections = spec["section"]["panel_bank_config"]["sections"]
    made = {section["name"]: section["panels"] for section in sections}
    for title, panels in dashboard.SECTIONS.items():
        assert len(made[title]) == len(panels)
        for panel, found in zip(panels, made[title], strict=True):
            assert panel.y[0].removesuffix(".min") in json.dumps(found, default=str)
    assert {panel["view_type"] for panels in made.values() for panel in panels} == {
        *("Run History Line Plot", "Scatter Plot", "Bar Chart", "Vega2", "Media Browser")
    }


def test_every_name_is_one_that_is_logged():
    sources = (
        "".join(path.read_text() for path in (ROOT / "longctx" / "training").glob("*.py"))
        + (ROOT / "longctx" / "runs" / "tracking.py").read_text()
        + (ROOT / "longctx" / "evaluation" / "report.py").read_text()
    )
    for panels in dashboard.SECTIONS.values():
        for panel in panels:
            keys = panel.y[:1] if panel.kind == "table" else panel.y
            for key in (panel.x, *keys):
                name = re.sub(
                    r"^eval/|/\.\*$|\.min$|_table$|_(position|context)_table$|_ms$", "", key
                )
                assert name in sources, key
