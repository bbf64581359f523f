"""Trackers get the numbers of metrics.jsonl, each by its real package, offline; wandb's workspace
shows what is logged.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longctx import cli, plugins
from longctx.config.doors import TRACKERS
from longctx.config.train_config import WandbConfig
from longctx.report import dashboard
from longctx.runs import metrics, metrics_file
from longctx.runs.metrics import EVERYWHERE, Metric
from longctx.runs.tracking import Tracker

FACTS = {"seq_len": 64, "model": {"layers": 2}}
LEGS: list[list[dict[str, Any]]] = [
    [{"step": n, "tokens_seen": 10 * n, "loss": 1 / n, "sample": "a"} for n in range(1, 4)],
    [{"step": 4, "tokens_seen": 40, "val_loss": 0.5}, {"step": 5, "tokens_seen": 50, "loss": None}],
]
ROWS = [{key: x for key, x in row.items() if key != "sample"} for leg in LEGS for row in leg]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker may take longer than a run waits, on a busy machine."""
    monkeypatch.setattr("longctx.runs.tracking.PATIENCE", 120.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "run-001"
    path.mkdir(parents=True)
    return path


def train(folder: Path, *names: str, **about: Any) -> str | None:
    """Log the rows of a run and of its resume; return what went wrong in the end."""
    for rows in LEGS:
        tracker = Tracker(folder, WandbConfig(project="roses", mode="offline"), names, **about)
        tracker.log(rows[0])
        tracker.start_copies(FACTS)
        for row in rows[1:]:
            tracker.log(row)
        problem = tracker.finish(0)
    return problem


def curve(key: str) -> Any:
    """The values of a key by their steps, to be compared with those of a tracker."""
    rows = [row for row in ROWS if key in row]
    values = {row["step"]: math.nan if row[key] is None else row[key] for row in rows}
    return pytest.approx(values, nan_ok=True)


def test_tensorboard_has_the_numbers_of_the_file(folder, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    # A link of the folder's name is replaced; temporary folders are removed
    (folder.parent / "elsewhere").mkdir()
    (folder / "tensorboard").symlink_to(folder.parent / "elsewhere")
    temporary = folder.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert train(folder, "tensorboard", "wandb") is None
    assert list((folder.parent / "elsewhere").iterdir()) == list(temporary.iterdir()) == []
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["tensors"]) == {"tokens_seen", "loss", "val_loss"}
    for key in events.Tags()["tensors"]:
        tensors = {x.step: make_ndarray(x.tensor_proto).item() for x in events.Tensors(key)}
        assert tensors == curve(key)


def test_mlflow_has_the_numbers_of_the_file(folder, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder.parent}/mlflow.db")
    assert train(folder, "mlflow") is None
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("roses").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run-001", "FINISHED")
    assert (run.data.params["seq_len"], run.data.params["model.layers"]) == ("64", "2")
    for key in ("tokens_seen", "loss", "val_loss"):
        history = client.get_metric_history(run.info.run_id, key)
        assert {metric.step: metric.value for metric in history} == curve(key)


def test_trackio_has_the_numbers_of_the_file(folder, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(folder.parent / "trackio"))  # read at import
    pytest.importorskip("trackio")
    assert train(folder, "trackio") is None
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("roses", "run-001")
    for key in ("tokens_seen", "loss", "val_loss"):
        assert {row["step"]: float(row[key]) for row in logs if key in row} == curve(key)


PLUGIN = """
import json
from longctx.runs.trackers import TrackerTraits, records, register

def copy(request, commands):
    with open(f"{request['folder']}/own.jsonl", "a") as file:
        for step, numbers in records(request, commands):
            print(json.dumps({"step": step} | numbers), file=file)

def fail(request, commands):
    print("noise")
    raise OSError("no room")

def hang(request, commands):
    for command in commands:
        pass

for name in ("hanging", "idle"):
    register(name, TrackerTraits(hang, lambda config, folder: ["nowhere"], "sync {folder}"))
register("own", TrackerTraits(copy, lambda config, folder: ["own.jsonl"]))
register("failing", TrackerTraits(fail, lambda config, folder: ["nowhere"]))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A plugin with four trackers, of which one fails and two never end."""
    file = tmp_path_factory.mktemp("plugins") / "trackers.py"
    file.write_text(PLUGIN)
    plugins.load([str(file)])
    yield str(file)
    for name in ("hanging", "idle", "own", "failing"):
        TRACKERS.remove(name)


def test_a_tracker_that_fails_stops_no_other(folder, own):
    problem = train(folder, "failing", "own", "none", plugins=[own])
    assert problem == "failing is off: no room; metrics.jsonl has every record"
    lines = (folder / "own.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines][:4] == ROWS[:4] and len(lines) == 5
    assert metrics_file.read(folder) == [*LEGS[0], *LEGS[1]]
    (opening,) = Tracker(folder, WandbConfig(mode="disabled"), ["wandb", "own"]).opening
    assert opening == "own        own.jsonl"


def test_trackers_that_hang_share_the_time_of_an_end(folder, own, monkeypatch):
    limits, wait = list[float](), subprocess.Popen.wait

    def noted(process: subprocess.Popen[bytes], timeout: float) -> int:
        limits.append(timeout)
        return wait(process, timeout)

    monkeypatch.setattr("longctx.runs.tracking.PATIENCE", 1.0)
    tracker = Tracker(folder, WandbConfig(), ["hanging", "idle"], [own])
    tracker.start_copies(FACTS)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", noted)
        problem = tracker.finish(0)
    assert len(limits) == 2 and sum(limits) < 1.5
    assert f"not there later: sync {folder}" in str(problem)
    for copy in tracker._copies:
        assert copy.process is not None
        copy.process.kill()
        copy.process.wait()


def test_a_tracker_that_cannot_be_used_is_refused(refused):
    assert "tensorboard" in refused(cli.main(["train", "tracker=tensorbord"]), "tracker=tensorbord")


# The workspace

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
    sections = spec["section"]["panel_bank_config"]["sections"]
    saved = {section["name"]: section["panels"] for section in sections}
    panels = [panel for section in saved.values() for panel in section]
    kinds = {"Run History Line Plot", "Scatter Plot", "Bar Chart"}
    assert {panel["view_type"] for panel in panels} == kinds
    curves = [x["config"] for x in panels if x["view_type"] == "Run History Line Plot"]
    titles = ", ".join(curve["chart_title"] for curve in curves).split(", ")
    families = {f"{metrics.BY_POSITION}/*", f"{metrics.FACTS_FOUND}/*"}
    shown = {x.key for x in metrics.METRICS if not x.hidden} - {"step"} | families
    assert sorted(titles) == sorted(shown)
    assert "pages_per_hour.last" in json.dumps(saved["Context extension"], default=str)
    assert "summary:pages_per_hour.last" in json.dumps(spec, default=str)
