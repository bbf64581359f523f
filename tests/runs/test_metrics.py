"""The table of metrics: one line of it shows a metric everywhere."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from longctx.config.train_config import TrainConfig
from longctx.report.compare import RunRecord, described, headings
from longctx.runs import metrics
from longctx.runs.metrics import Metric, Shown, figures
from longctx.runs.metrics_file import Tail
from longctx.runs.wandb_copy import define_metrics
from longctx.training.run_log import brief, closing_lines
from longctx.training.sweep import Job, sweep_table
from tests.report.run_files import compare, make, step
from tests.training.sample_run import sample_run

SPEED = Metric("pages_per_hour", "reading", ",.1f", "pages/h", metrics.EVERYWHERE, "max", "median")
FAMILY = Metric("gates/*", "gate", ".1f", shown=Shown.CONSOLE)
VALUES = {"ms_per_step": 1.0, "gates/a/3": 7.5}
ROWS = [{"step": n, "tokens_seen": n, "pages_per_hour": 1000.0 * n, **VALUES} for n in range(1, 4)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose rows hold two metrics that are new in the table."""
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, SPEED, FAMILY))
    return make(tmp_path / "run", ROWS)


def test_a_new_metric_is_on_the_terminal(run):
    assert "2,000.0 pages/h" in brief(ROWS[1])
    assert "gate a at 3 7.5" in brief(ROWS[1])
    ended = replace(sample_run(TrainConfig()), folder=run)
    assert any("2,500.0 pages/h (median)" in x for x in closing_lines(ended, {}, "", steps=3))
    headings, (cells,) = sweep_table([Job(["seed=1"], 0, run)])
    assert dict(zip(headings, cells, strict=True))["reading\n(pages/h)"] == "2,500.0"


def test_a_new_metric_is_in_compare_and_on_its_page(run, tmp_path, capsys):
    compare([run], tmp_path / "x.html")
    printed = capsys.readouterr().out
    assert "reading (pages/h)" in printed and "2,500.0" in printed
    drawn = described(RunRecord(run))
    assert drawn["curves"]["pages_per_hour"]["y"] == [1000.0, 2000.0, 3000.0]
    assert drawn["figures"]["pages_per_hour"] == 2500.0
    for place in (Shown.CURVE, Shown.CONTEXT):
        assert headings(place)["pages_per_hour"] == "reading (pages/h)"


def test_a_new_metric_is_at_wandb(run):
    wandb_run = MagicMock()
    define_metrics(wandb_run)
    key, options = "pages_per_hour", {"step_metric": "tokens_seen", "summary": "max,last"}
    wandb_run.define_metric.assert_any_call(key, **options)


def test_each_key_has_one_line_here_and_on_its_page():
    keys = [metric.key for metric in metrics.METRICS]
    assert sorted(keys) == sorted(set(keys))
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [key for key in keys if f"`{key.removesuffix('*')}" not in page] == []


def test_a_figure_is_the_last_median_or_largest():
    rows = [
        {"step": n, "tokens_seen": n, "loss": loss, "mfu": mfu, "memory_peak_gib": memory}
        for n, (loss, mfu, memory) in enumerate([(3, 0.1, 5.0), (2, 0.5, 9.0), (1, 0.7, 7.0)], 1)
    ]
    result = figures(rows)
    assert result["loss"] == 1 and result["mfu"] == 0.6 and result["memory_peak_gib"] == 9.0
    assert "lr" not in result
    for loss in (None, math.nan):
        assert math.isnan(figures([*rows, {"step": 4, "tokens_seen": 4, "loss": loss}])["loss"])


def test_a_replaced_file_is_read_from_its_beginning(tmp_path):
    folder = make(tmp_path / "a", [step(1), step(2), step(3)])
    tail = Tail(folder)
    assert [row["step"] for row in tail.records()] == [1, 2, 3]
    assert tail.records() == []
    for steps in ([2], [4, 5, 6, 7]):
        (folder / "new").write_text("".join(json.dumps(step(n)) + "\n" for n in steps))
        os.replace(folder / "new", folder / "metrics.jsonl")
        assert [row["step"] for row in tail.records()] == steps
