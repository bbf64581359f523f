"""metrics.jsonl is the truth and wandb a copy of it, offline without a key."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longctx.training import runs
from longctx.training.config import WandbConfig
from longctx.training.tracking import Tracker, wandb_mode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_a_key_decides_between_online_and_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert wandb_mode(WandbConfig()) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
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
from longctx.training.config import WandbConfig
from longctx.training.tracking import Tracker
tracker = Tracker(Path({str(tmp_path)!r}), WandbConfig(mode="disabled"), resumed=False)
tracker.log({{"step": 1, "tokens_seen": 5, "loss": 2.0}})
assert tracker.start_wandb({{}}) is None
tracker.finish(0)
assert "wandb" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert runs.read_metrics(tmp_path) == [{"step": 1, "tokens_seen": 5, "loss": 2.0}]


def test_wandb_gets_the_rows_logged_before_and_after_its_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run-001"
    folder.mkdir()
    tracker = Tracker(folder, WandbConfig(tags=["a"], notes="why"), resumed=False)
    rows = [{"step": n, "tokens_seen": 10 * n, "loss": 1 / n} for n in range(1, 6)]
    for row in rows[:2]:
        tracker.log(row)
    assert tracker.start_wandb({"config": {"lr": 0.1}, "kernels": {"flash": "x"}}) is None
    for row in rows[2:]:
        tracker.log(row)
    tracker.finish(0)
    assert runs.read_metrics(folder) == rows
    assert "wandb leet" in str(tracker.how_to_look())
    assert capfd.readouterr() == ("", "")
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert _history(file) == rows


def test_a_wandb_that_cannot_start_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Tracker, facts: dict[str, object]) -> None:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(Tracker, "_init_wandb", refuse)
    tracker = Tracker(tmp_path, WandbConfig(mode="online"), resumed=False)
    tracker.log({"step": 1, "tokens_seen": 5})
    assert tracker.start_wandb({}) == "wandb is off: no route"
    assert tracker.start_wandb({}) is None
    tracker.log({"step": 2, "tokens_seen": 9})
    tracker.finish(0)
    assert [row["step"] for row in runs.read_metrics(tmp_path)] == [1, 2]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker(tmp_path, WandbConfig(mode="disabled"), resumed=False)
    with pytest.raises(OSError, match=r"metrics\.jsonl: cannot be written"):
        tracker.log({"step": 1, "tokens_seen": 5})
    tracker.finish(1)


def _history(file: Path) -> list[dict[str, object]]:
    """The rows in a .wandb file, as wandb's own reader finds them, without wandb's private columns."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in printed.splitlines()]
    rows = [record["history"]["item"] for record in records if record.get("type") == "history"]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
