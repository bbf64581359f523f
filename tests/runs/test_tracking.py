"""metrics.jsonl is the truth and wandb a copy of it, offline without a key."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from longctx import cli
from longctx.config.train_config import WandbConfig
from longctx.evaluation import results
from longctx.runs import metrics, metrics_file, tracking
from longctx.runs.metrics import BY_POSITION
from longctx.runs.tracking import Tracker
from longctx.runs.wandb_copy import send_run, wandb_mode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb may take longer than a run waits, on a busy machine."""
    monkeypatch.setattr("longctx.runs.tracking.PATIENCE", 120.0)


def test_a_key_decides_online_or_offline(monkeypatch, tmp_path):
    for host in ("elsewhere", "api.wandb.ai", "api.forge.coreweave.com"):
        mode = "offline" if host == "elsewhere" else "online"
        (tmp_path / "netrc").write_text(f"machine {host} login user password secret\n")
        assert wandb_mode(WandbConfig()) == mode
    (tmp_path / "netrc").unlink()
    assert wandb_mode(WandbConfig()) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode(WandbConfig()) == "online"
    assert wandb_mode(WandbConfig(mode="disabled")) == "disabled"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(WandbConfig()) == "offline"


ROWS = [{"step": n, "tokens_seen": 10 * n, "loss": 1 / n} for n in range(1, 41)]


def begun(folder: Path, **config: Any) -> tuple[Tracker, int]:
    """A tracker whose run has begun at wandb, and the process of the copy."""
    tracker = Tracker(folder, WandbConfig(mode="offline", **config))
    tracker.start_copies({})
    (copy,) = tracker._copies
    assert copy.process is not None
    while not list(folder.glob("wandb/offline-run-*/run-*.wandb")):
        time.sleep(0.05)
    return tracker, copy.process.pid


def whole_copy(folder: Path) -> list[dict[str, object]]:
    """The rows of the one run offline, once its process has written all of them."""
    rows: list[dict[str, object]] = []
    while len(rows) < len(ROWS):
        time.sleep(0.5)
        files = folder.glob("wandb/offline-run-*/run-*.wandb")
        rows = [row for file in files for row in _history(file)]
    return rows


def test_a_killed_process_is_one_line(tmp_path):
    tracker, process = begun(tmp_path)
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    for row in ROWS:
        tracker.log(row)
    assert "wandb is off" in str(tracker.problem()) and tracker.problem() is None
    assert tracker.finish(0) is None and metrics_file.read(tmp_path) == ROWS


@pytest.mark.slow
def test_silent_servers_delay_no_end(tmp_path, monkeypatch):
    """One refuses connections, one takes them and says nothing."""
    assert tracking.PATIENCE < 10
    monkeypatch.setattr(tracking, "PATIENCE", 0.1)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        for server in (silent, refusing):
            port = server.getsockname()[1]
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
            folder = tmp_path / str(port)
            folder.mkdir()
            tracker = Tracker(folder, WandbConfig(mode="online"))
            tracker.start_copies({})
            for row in ROWS:
                tracker.log(row)
            assert "wandb sync" in str(tracker.finish(0))
            assert metrics_file.read(folder) == ROWS
        for folder in tmp_path.iterdir():
            assert whole_copy(folder) == ROWS


def test_a_copy_that_cannot_start_ends_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    tracker = Tracker(tmp_path, WandbConfig(mode="offline"))
    tracker.start_copies({})
    assert "wandb is off" in str(tracker.problem())
    tracker.log(ROWS[0])
    copied = tracking.follow({"folder": str(tmp_path)}, iter([{}, {"finish": 0}]))
    assert next(copied) == ROWS[0]
    (tmp_path / metrics_file.FILE).unlink()  # by somebody, while it trains
    tracker.log(ROWS[1])
    assert tracker.finish(0) is None and metrics_file.read(tmp_path) == ROWS[:2]
    assert list(copied) == ROWS[1:2]  # each once


def test_a_full_disk_names_the_file(tmp_path):
    tracker = Tracker(tmp_path, WandbConfig(mode="disabled"))
    os.dup2(os.open("/dev/full", os.O_WRONLY), tracker._file.fileno())
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        tracker.log(ROWS[0])
    tracker.finish(1)


def test_the_start_prints_the_target(tmp_path, monkeypatch):
    (without_key,) = Tracker(tmp_path, WandbConfig("p", "acme", mode="online")).opening
    assert all(x in without_key for x in ("acme/p", "no API key"))
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    (with_key,) = Tracker(tmp_path, WandbConfig("p", "mine")).opening
    assert "mine/p" in with_key and "no API key" not in with_key
    assert Tracker(tmp_path, WandbConfig(mode="disabled")).opening == []


def validation(step: int) -> dict[str, float]:
    losses = {"val_loss": 5.0 / step, "val_perplexity": 9.0 / step}
    by_position = {f"{BY_POSITION}/{2**b}": 5.0 / step - 0.1 * b for b in range(4)}
    return {"step": step, "tokens_seen": 10 * step, **losses, **by_position}


@pytest.mark.usefixtures("patient")
def test_a_resume_is_a_new_leg_offline(tmp_path, capfd):
    folder = tmp_path / "run-001"
    folder.mkdir()
    numbers = {"tokens_per_second": 9.0, "memory_peak_gib": 2.0, "process_peak_gib": 3.0}
    steps = [{"step": n, "tokens_seen": 10 * n, "loss": 1 / n, **numbers} for n in range(1, 5)]
    legs = [[*steps[:2], validation(2)], [*steps[2:], validation(4)]]
    for rows in legs:
        tracker = Tracker(folder, WandbConfig(job_type="probe"))
        tracker.log(rows[0])
        tracker.start_copies({"backend": "flash"})
        for row in rows[1:]:
            tracker.log(row)
        tracker.finish(0)
    assert capfd.readouterr() == ("", "")
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=os.path.getmtime)
    assert [row for file in files for row in _history(file)] == legs[0] + legs[1]
    records = [_records(file) for file in files]
    runs = [next(r["run"] for r in leg if r["type"] == "run") for leg in records]
    assert [run["display_name"] for run in runs] == ["run-001", "run-001-leg2"]
    assert {(run["run_group"], run["job_type"]) for run in runs} == {("run-001", "probe")}
    config = runs[1]["config"]["update"]
    assert config["backend"] == "flash" and config["leg"] == 2
    command = next(r["environment"] for r in records[1] if r["type"] == "environment")
    assert (command["program"], command.get("args", [])) == (sys.argv[0], sys.argv[1:])
    # The summary has the extremes
    defined = [r["metric"] for r in records[0] if r["type"] == "metric"]
    summaries = {x["name"]: x["summary"] for x in defined if "name" in x and "summary" in x}
    for metric in metrics.METRICS:
        if metric.summary is not None:
            assert summaries[metric.key] == {"last": True, metric.summary: True}


def send(folder: Path, mode: str, rows: Any = (), before: int = 0, **config: Any) -> None:
    """Do what the process of a copy does with the `rows` of a run."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = {"config": vars(WandbConfig(**config)), "folder": str(folder), "mode": mode}
    request |= {"metadata": {}, "records_before": before}
    send_run(request, iter([{"finish": 0}]))


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """wandb.init, which returns the same run each time."""
    made = MagicMock(return_value=MagicMock(id="run", dir="/a/run-1/files"))
    monkeypatch.setattr(pytest.importorskip("wandb"), "init", made)
    return made


def test_a_resumed_run_continues_online_under_its_id(tmp_path, monkeypatch, init):
    send(tmp_path, "online", group="g")
    assert init.call_args.kwargs["mode"] == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    for _ in range(2):
        send(tmp_path, "online", group="g")
    first, second = (call.kwargs for call in init.call_args_list[1:])
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert first["name"] == second["name"] == tmp_path.name and second["group"] == "g"
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    send(tmp_path / "other", "online")
    assert init.call_args.kwargs["id"] == "chosen"


def test_tables_hold_rows_of_earlier_starts_too(tmp_path, init):
    run = init.return_value
    rows: list[dict[str, Any]] = [
        {"step": n, "tokens_seen": 10 * n, "sample": f"text {n}"} for n in (1, 2)
    ]
    send(tmp_path, "offline", rows=[*rows, {"step": 3, "tokens_seen": 30, "loss": None}], before=1)
    second, third = (call.args[0] for call in run.log.call_args_list)
    assert second["samples"].data == [[10, "text 1"], [20, "text 2"]]
    assert "sample" not in second and math.isnan(third["loss"])


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("variable", "is_sent"), [("disabled", False), ("offline", True)])
def test_an_evaluation_is_a_run_of_its_own(variable, is_sent, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", variable)
    buckets = [{"first": 2**b, "last": 2 ** (b + 1) - 1, "loss": 3.0 - b} for b in range(3)]
    score = {"perplexity": 7.5, "word_perplexity": 99.0, "bits_per_byte": 1.5}
    content: dict[str, Any] = {
        "asked": {},
        "context": 64,
        "total": {"name": "all", **score, "standard_error": None},
        "by_position": [row | {"tokens": 9} for row in buckets],
        "by_context": [{"context": 2**b, "tokens": 9, "loss": 3.0 - b} for b in range(3)],
        "documents": [{"name": "a", "tokens": 3, "bits_per_byte": 1.5}],
    }
    results.save(content, "x", SimpleNamespace(run=None, home=tmp_path), "auto")  # type: ignore[arg-type]
    files = list(tmp_path.glob("eval/wandb/offline-run-*/run-*.wandb"))
    assert len(files) == is_sent
    for records in ({record["type"]: record for record in _records(file)} for file in files):
        row, run = records["history"]["history"]["item"], records["run"]["run"]
        assert (run["job_type"], run["run_group"]) == ("eval", tmp_path.name)
        assert row["eval/perplexity"] == 7.5 and "eval/documents" in {x.split(".")[0] for x in row}


def test_a_sweep_file_gives_train_its_overrides():
    """As `wandb agent` makes them of configs/sweep.yaml."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    sweep = yaml.safe_load((ROOT / "configs" / "sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file() and sweep["command"][-1] == "${args_no_hyphens}"
    for choice in (0, -1):
        values = {key: about["values"][choice] for key, about in sweep["parameters"].items()}
        args = {key: {"value": value} for key, value in values.items()}
        overrides = utils.create_sweep_command_args({"args": args})["args_no_hyphens"]
        config = cli.compose("train", overrides).config
        assert [config.attention.backend, config.seq_len, config.lr] == list(values.values())
    assert sweep["metric"]["name"] in {metric.key for metric in metrics.METRICS}


def _records(file: Path) -> list[dict[str, Any]]:
    """What wandb's own offline reader finds in a .wandb file."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def _history(file: Path) -> list[dict[str, object]]:
    """The rows in a .wandb file, without wandb's private columns."""
    rows = [record["history"]["item"] for record in _records(file) if record["type"] == "history"]
    return [{key: x for key, x in row.items() if not key.startswith("_")} for row in rows]
