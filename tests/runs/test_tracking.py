"""metrics.jsonl is the truth and wandb a copy of it, offline without a key."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from longctx import cli
from longctx.config.train_config import WandbConfig
from longctx.evaluation import results
from longctx.report import dashboard
from longctx.runs import metrics, metrics_file
from longctx.runs.metrics import BY_POSITION, Shown
from longctx.runs.tracking import (
    Copy,
    Tracker,
    log_evaluation,
    wandb_mode,
)
from longctx.runs.wandb_process import evaluated, run_id, send_run
from tests.processes import children

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_a_key_decides_between_online_and_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert wandb_mode(WandbConfig()) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode(WandbConfig()) == "online"
    (tmp_path / "netrc").write_text("machine api.forge.coreweave.com login user password secret\n")
    assert wandb_mode(WandbConfig()) == "online"
    (tmp_path / "netrc").write_text("machine elsewhere login user password secret\n")
    assert wandb_mode(WandbConfig()) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode(WandbConfig()) == "online"
    assert wandb_mode(WandbConfig(mode="disabled")) == "disabled"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(WandbConfig()) == "offline"


@pytest.mark.slow
def test_wandb_gets_the_rows_logged_before_and_after_its_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run-001"
    folder.mkdir()
    tracker = Tracker(folder, WandbConfig(tags=["a"], notes="why"))
    rows = [{"step": n, "tokens_seen": 10 * n, "loss": 1 / n} for n in range(1, 6)]
    rows[1:1] = [validation(1)]
    for row in rows[:2]:
        tracker.log(row)
    tracker.start_wandb({"config": {"lr": 0.1}, "kernels": {"flash": "x"}})
    for row in rows[2:]:
        tracker.log(row)
    tracker.finish(0)
    assert metrics_file.read(folder) == rows
    assert "wandb leet" in str(tracker.opening())
    assert capfd.readouterr() == ("", "")
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert _history(file) == rows


ROWS = [{"step": n, "tokens_seen": 10 * n, "loss": 1 / n} for n in range(1, 41)]


def wait_until_begun(copy: Copy) -> None:
    deadline = time.monotonic() + 60
    while not copy.begun():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def whole_copy(folder: Path) -> list[dict[str, object]]:
    """The rows of the one run offline, once its process has written all of them."""
    deadline = time.monotonic() + 60
    while True:
        rows = [
            row for file in folder.glob("wandb/offline-run-*/run-*.wandb") for row in _history(file)
        ]
        if len(rows) == len(ROWS) or time.monotonic() > deadline:
            return rows
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["its core", "its process"])
def test_a_wandb_that_is_killed_is_said_once_and_all_is_copied_anew(
    victim: str, tmp_path: Path
) -> None:
    tracker = Tracker(tmp_path, WandbConfig(mode="offline"))
    tracker.start_wandb({})
    copy = tracker._copy
    assert copy is not None and copy.process is not None
    for row in ROWS[:20]:
        tracker.log(row)
    wait_until_begun(copy)
    process = copy.process
    [core] = children(process.pid)
    os.kill(core if victim == "its core" else process.pid, signal.SIGKILL)
    problems = []
    for row in ROWS[20:]:
        tracker.log(row)
        problems.append(tracker.problem())
    tracker.finish(0)
    problems.append(tracker.problem())
    [problem] = filter(None, problems)
    assert "upload: wandb sync" in problem
    assert metrics_file.read(tmp_path) == ROWS
    assert whole_copy(tmp_path) == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("listens", [False, True], ids=["refuses", "is silent"])
def test_a_server_that_does_not_answer_costs_ten_seconds_and_all_is_copied_offline(
    listens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen(50)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        tracker = Tracker(tmp_path, WandbConfig(mode="online"))
        began = time.monotonic()
        tracker.start_wandb({})
        for row in ROWS:
            tracker.log(row)
        tracker.finish(0)
        assert time.monotonic() - began < 10
        assert "upload: wandb sync" in str(tracker.problem())
        assert tracker.problem() is None
        assert metrics_file.read(tmp_path) == ROWS
        assert whole_copy(tmp_path) == ROWS


def test_a_folder_that_cannot_hold_what_is_sent_ends_the_copy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    tracker = Tracker(tmp_path, WandbConfig(mode="offline"))
    tracker.start_wandb({})
    assert "wandb is off" in str(tracker.problem())
    tracker.log(ROWS[0])
    tracker.finish(0)
    assert tracker.problem() is None
    assert metrics_file.read(tmp_path) == ROWS[:1]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker(tmp_path, WandbConfig(mode="disabled"))
    with pytest.raises(OSError, match=r"metrics\.jsonl: cannot be written"):
        tracker.log({"step": 1, "tokens_seen": 5})
    tracker.finish(1)


def opening(folder: Path, **config: Any) -> str:
    tracker = Tracker(folder, WandbConfig(**config))
    tracker.finish(0)
    return str(tracker.opening())


def test_start_says_where_rows_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"entity": "acme", "project": "p", "artifacts": True}
    without_key = opening(tmp_path, mode="online", **theirs)
    assert "acme/p" in without_key and "checkpoints" in without_key
    assert "no API key" in without_key and "wandb login" in without_key
    assert "acme/p" in opening(tmp_path, mode="offline", **theirs)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_ENTITY", "mine")
    with_key = opening(tmp_path)
    assert "mine/longctx" in with_key
    assert "checkpoints" not in with_key and "no API key" not in with_key
    assert opening(tmp_path, mode="disabled") == "None"


def test_start_says_when_wandb_gets_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    several = "several runs"
    assert several not in opening(tmp_path, mode="offline")
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    assert several in opening(tmp_path, mode="offline") and several in opening(tmp_path)
    (tmp_path / "other" / "wandb").mkdir(parents=True)
    run_id(tmp_path / "other")
    assert several in opening(tmp_path / "other", mode="offline")
    assert several not in opening(tmp_path / "other")


def validation(step: int) -> dict[str, float]:
    by_position = {f"{BY_POSITION}/{2**b}": 5.0 / step - 0.1 * b for b in range(4)}
    return {
        "step": step,
        "tokens_seen": 10 * step,
        "val_loss": 5.0 / step,
        "val_perplexity": 9.0 / step,
        **by_position,
    }


def test_a_resumed_run_is_a_new_leg_of_its_group_offline(tmp_path: Path) -> None:
    folder = tmp_path / "run-001"
    folder.mkdir()
    numbers = {"tokens_per_second": 9.0, "memory_peak_gib": 2.0, "process_peak_gib": 3.0}
    legs = [
        [{"step": n, "tokens_seen": 10 * n, "loss": 1.0 / n, **numbers} for n in steps]
        + [validation(steps[1])]
        for steps in ((1, 2), (3, 4))
    ]
    for rows in legs:
        tracker = Tracker(folder, WandbConfig(job_type="probe"))
        tracker.start_wandb({"backend": "flash", "kernel_lock": {"format": 1}})
        for row in rows:
            tracker.log(row)
        tracker.finish(0)
    files = sorted(
        folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime
    )
    assert (
        [row for file in files for row in _history(file)]
        == metrics_file.read(folder)
        == legs[0] + legs[1]
    )
    records = [_records(file) for file in files]
    runs = [next(r["run"] for r in leg if r["type"] == "run") for leg in records]
    assert [run["display_name"] for run in runs] == ["run-001", "run-001-leg2"]
    assert {run["run_group"] for run in runs} == {"run-001"}
    assert {run["job_type"] for run in runs} == {"probe"}
    config = runs[1]["config"]["update"]
    command = next(r["environment"] for r in records[1] if r["type"] == "environment")
    assert (command["program"], command["args"]) == (sys.argv[0], sys.argv[1:])
    assert config["backend"] == "flash" and config["leg"] == 2 and len(config["commit"]) >= 40
    defined = {
        r["metric"].get("name") or r["metric"]["glob_name"]: r["metric"]
        for r in records[0]
        if r["type"] == "metric"
    }
    for metric in metrics.METRICS:
        if metric.summary is not None:
            assert defined[metric.key]["summary"] == {"last": True, metric.summary: True}
    assert defined["*"]["step_metric"] == defined["loss"]["step_metric"] == "tokens_seen"
    summary: dict[str, Any] = {}
    for record in records[0]:
        if record["type"] == "summary":
            summary |= record["summary"]["update"]
    for metric in metrics.shown(Shown.CONTEXT):
        key, _, part = dashboard.over(metric).partition(".")
        assert part in summary[key], "the workspace shows what the summary of a run has"
    tables = sorted(
        folder.glob("wandb/offline-run-*/files/media/table/loss_by_position_*.json"),
        key=lambda p: p.stat().st_mtime,
    )
    assert len(tables) == 2
    assert [len(json.loads(table.read_text())["data"]) for table in tables] == [4, 8]


def send(folder: Path, mode: str, *messages: dict[str, Any], **config: Any) -> None:
    """What the process of a copy does with `messages`."""
    folder.mkdir(exist_ok=True)
    request = {"config": vars(WandbConfig(**config)), "folder": str(folder)}
    request |= {"facts": {}, "positions": [], "samples": []}
    send_run(request, mode, iter([*messages, {"finish": 0}]), folder / "begun")


def test_a_resumed_run_continues_online_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(
        wandb, "init", lambda **about: calls.append(about) or MagicMock(dir="/a/run-1/files")
    )
    for _ in range(2):
        send(tmp_path, "online", group="g")
    first, second = calls
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert first["name"] == second["name"] == tmp_path.name and second["group"] == "g"
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    send(tmp_path / "other", "online")
    assert calls[2]["id"] == "chosen"


def test_a_checkpoint_is_uploaded_unless_a_newer_one_has_replaced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    path = tmp_path / "step-00000003.ckpt"
    path.write_bytes(b"weights")
    run = MagicMock(id="run", dir="/a/run-1/files")
    monkeypatch.setattr(wandb, "init", lambda **about: run)
    gone = {"checkpoint": str(tmp_path / "step-00000002.ckpt"), "step": 2}
    send(tmp_path, "offline", gone, {"checkpoint": str(path), "step": 3})
    assert run.log_artifact.call_count == 1
    artifact = run.log_artifact.call_args.args[0]
    assert list(artifact.manifest.entries) == ["step-00000003.ckpt"]
    assert run.log_artifact.call_args.kwargs["aliases"] == ["latest", "step-3"]


def test_samples_of_text_are_a_table_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    run = MagicMock(id="run", dir="/a/run-1/files")
    monkeypatch.setattr(wandb, "init", lambda **about: run)
    rows = [{"step": n, "tokens_seen": 10 * n, "sample": f"text {n}"} for n in (1, 2)]
    send(tmp_path, "offline", *({"row": row} for row in rows))
    logged = [call.args[0] for call in run.log.call_args_list]
    assert [row["samples"].data for row in logged] == [
        [[10, "text 1"]],
        [[10, "text 1"], [20, "text 2"]],
    ]
    assert all("sample" not in row for row in logged)


def test_an_evaluation_is_a_run_of_its_own_kind_with_tables_and_plots(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    (tmp_path / "eval").mkdir()
    Figure().savefig(tmp_path / "x.png")
    rows = [
        {"first": 2**b, "last": 2 ** (b + 1) - 1, "loss": 3.0 - b, "context": 2**b}
        for b in range(3)
    ]
    content = {
        "context": 64,
        "checkpoint": "a.ckpt",
        "total": {"name": "all", "perplexity": 7.5, "bits_per_byte": None},
        "by_position": rows,
        "by_context": [],
        "gains": [],
        "documents": [{"name": "a", "tokens": 3}],
    }
    config = WandbConfig(mode="offline")
    assert log_evaluation(config, tmp_path, content, tmp_path / "x.png") == "offline"
    (file,) = tmp_path.glob("eval/wandb/offline-run-*/run-*.wandb")
    (row,) = [record["history"]["item"] for record in _records(file) if record["type"] == "history"]
    assert row["eval/perplexity"] == 7.5
    assert {key.split(".")[0].removesuffix("_table") for key in row if key.startswith("eval/")} == {
        "eval/perplexity",
        "eval/picture",
        "eval/loss_by_position",
        "eval/documents",
    }
    run = next(record["run"] for record in _records(file) if record["type"] == "run")
    assert (run["job_type"], run["run_group"]) == ("eval", tmp_path.name)


@pytest.mark.parametrize(("variable", "copies"), [("disabled", 0), ("offline", 1)])
def test_an_evaluation_goes_where_the_environment_says(
    variable: str, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = MagicMock()
    monkeypatch.setattr("longctx.evaluation.results.log_evaluation", sent)
    monkeypatch.setenv("WANDB_MODE", variable)
    results.send({}, None, "auto", MagicMock(run=None, home=tmp_path))
    assert sent.call_count == copies


def test_numbers_of_every_kind_of_evaluation_go_to_wandb() -> None:
    grid = {"lengths": [64, 128], "depths": [0, 1], "accuracy": [[1.0, 1.0], [0.5, 0.0]]}
    assert evaluated({"kinds": {"needle": grid}}) == {
        "eval/needle/64": 1.0,
        "eval/needle/128": 0.25,
    }
    assert evaluated({"results": {"arc": {"acc,none": 0.5, "alias": "x"}}}) == {"eval/arc/acc": 0.5}


def test_a_sweep_file_gives_train_its_overrides() -> None:
    """As `wandb agent` makes them of configs/sweep.yaml."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    sweep = yaml.safe_load((ROOT / "configs" / "sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file() and sweep["command"][-1] == "${args_no_hyphens}"
    choices = [about["values"] for about in sweep["parameters"].values()]
    every = list(itertools.product(*choices))
    for values in (every[0], every[-1]):
        args = {
            key: {"value": value} for key, value in zip(sweep["parameters"], values, strict=True)
        }
        overrides = utils.create_sweep_command_args({"args": args})["args_no_hyphens"]
        composed = cli.compose("train", overrides)
        assert (
            composed.config.attention.backend,
            composed.config.seq_len,
            composed.config.lr,
        ) == values
    assert metrics.named(sweep["metric"]["name"]) is not None


def _records(file: Path) -> list[dict[str, Any]]:
    """What wandb's own offline reader finds in a .wandb file."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def _history(file: Path) -> list[dict[str, object]]:
    """The rows in a .wandb file, without wandb's private columns, tables and plots."""
    rows = [record["history"]["item"] for record in _records(file) if record["type"] == "history"]
    return [
        {key: x for key, x in row.items() if not key.startswith(("_", "loss_by_position"))}
        for row in rows
    ]
