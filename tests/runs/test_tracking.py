"""metrics.jsonl is the truth and wandb a copy of it, offline without a key."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from longctx import cli
from longctx.config.train_config import WandbConfig
from longctx.runs import metrics, run_folder
from longctx.runs.metrics import BY_POSITION
from longctx.runs.tracking import Tracker, evaluated, log_evaluation, wandb_mode

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


def test_disabled_never_imports_wandb(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from longctx.config.train_config import WandbConfig
from longctx.runs.tracking import Tracker
tracker = Tracker(Path({str(tmp_path)!r}), WandbConfig(mode="disabled"))
tracker.log({{"step": 1, "tokens_seen": 5, "loss": 2.0}})
assert tracker.start_wandb({{}}) is None
tracker.finish(0)
assert "wandb" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert run_folder.read_metrics(tmp_path) == [{"step": 1, "tokens_seen": 5, "loss": 2.0}]


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
    assert tracker.start_wandb({"config": {"lr": 0.1}, "kernels": {"flash": "x"}}) is None
    for row in rows[2:]:
        tracker.log(row)
    tracker.finish(0)
    assert run_folder.read_metrics(folder) == rows
    assert "wandb leet" in str(tracker.how_to_look())
    assert capfd.readouterr() == ("", "")
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert _history(file) == rows


def test_a_wandb_that_cannot_start_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Tracker, facts: dict[str, object]) -> None:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(Tracker, "_init_wandb", refuse)
    tracker = Tracker(tmp_path, WandbConfig(mode="online"))
    tracker.log({"step": 1, "tokens_seen": 5})
    assert "no route" in str(tracker.start_wandb({}))
    assert tracker.start_wandb({}) is None
    tracker.log({"step": 2, "tokens_seen": 9})
    tracker.finish(0)
    assert [row["step"] for row in run_folder.read_metrics(tmp_path)] == [1, 2]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker(tmp_path, WandbConfig(mode="disabled"))
    with pytest.raises(OSError, match=r"metrics\.jsonl: cannot be written"):
        tracker.log({"step": 1, "tokens_seen": 5})
    tracker.finish(1)


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
    legs = [
        [{"step": n, "tokens_seen": 10 * n, "loss": 1.0 / n} for n in steps]
        + [validation(steps[1])]
        for steps in ((1, 2), (3, 4))
    ]
    for rows in legs:
        tracker = Tracker(folder, WandbConfig(job_type="probe"))
        assert tracker.start_wandb({"backend": "flash", "kernel_lock": {"format": 1}}) is None
        for row in rows:
            tracker.log(row)
        tracker.finish(0)
    files = sorted(
        folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime
    )
    assert (
        [row for file in files for row in _history(file)]
        == run_folder.read_metrics(folder)
        == legs[0] + legs[1]
    )
    records = [_records(file) for file in files]
    runs = [next(r["run"] for r in leg if r["type"] == "run") for leg in records]
    assert [run["display_name"] for run in runs] == ["run-001", "run-001-leg2"]
    assert {run["run_group"] for run in runs} == {"run-001"}
    assert {run["job_type"] for run in runs} == {"probe"}
    config = runs[1]["config"]["update"]
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
    tables = sorted(
        folder.glob("wandb/offline-run-*/files/media/table/loss_by_position_*.json"),
        key=lambda p: p.stat().st_mtime,
    )
    assert len(tables) == 2
    assert [len(json.loads(table.read_text())["data"]) for table in tables] == [4, 8]


def test_a_resumed_run_continues_online_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(wandb, "init", lambda **about: calls.append(about) or MagicMock())
    for _ in range(2):
        tracker = Tracker(tmp_path, WandbConfig(mode="online", group="g"))
        assert tracker.start_wandb({}) is None
        tracker.finish(0)
    first, second = calls
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert first["name"] == second["name"] == tmp_path.name and second["group"] == "g"
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    (tmp_path / "other").mkdir()
    Tracker(tmp_path / "other", WandbConfig(mode="online")).start_wandb({})
    assert calls[2]["id"] == "chosen"


def test_checkpoints_are_uploaded_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    path = tmp_path / "step-00000003.ckpt"
    path.write_bytes(b"weights")
    for wanted in (False, True):
        run = MagicMock(id=f"run-{wanted}")
        monkeypatch.setattr(wandb, "init", lambda run=run, **about: run)
        tracker = Tracker(tmp_path, WandbConfig(mode="offline", artifacts=wanted))
        tracker.checkpoint(path, 2)
        assert tracker.start_wandb({}) is None
        tracker.checkpoint(path, 3)
        assert run.log_artifact.call_count == wanted
    artifact = run.log_artifact.call_args.args[0]
    assert list(artifact.manifest.entries) == ["step-00000003.ckpt"]
    assert run.log_artifact.call_args.kwargs["aliases"] == ["latest", "step-3"]


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
        composed = cli.compose("train", cli.read("train", overrides).overrides)
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
