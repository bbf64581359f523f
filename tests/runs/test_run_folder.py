"""Run folders: claimed once, locked while in use, found again, replaced whole."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from longctx.model.__main__ import newest
from longctx.runs import run_folder


def test_runs_started_together_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(
            pool.map(
                lambda _: run_folder.create(tmp_path / "runs", None, "tiny-flash-4k"), range(40)
            )
        )
    assert sorted(path.name for path in made) == [f"tiny-flash-4k-{n:03d}" for n in range(1, 41)]


def test_a_name_is_used_once(tmp_path: Path) -> None:
    assert run_folder.create(tmp_path, "mine", "x") == tmp_path / "mine"
    with pytest.raises(ValueError, match="resume="):
        run_folder.create(tmp_path, "mine", "x")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "runs", Path("/proc/runs")):
        with pytest.raises(OSError, match="runs="):
            run_folder.check_root(root)
    run_folder.check_root(tmp_path / "new" / "deep")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_last_checkpoint_is_that_of_the_last_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for step in (99_999_999, 100_000_000, 5):
        (tmp_path / "checkpoints" / f"step-{step:08d}.ckpt").touch()
    names = [path.stem for path in run_folder.checkpoints(tmp_path)]
    assert names == ["step-00000005", "step-99999999", "step-100000000"]
    assert newest(tmp_path).stem == names[-1]


def test_another_process_cannot_train_the_same_run(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from longctx.runs import run_folder as runs\nwith run_folder.locked(Path({str(tmp_path)!r})): pass"
    command = [sys.executable, "-c", code]
    root = Path(__file__).resolve().parents[2]
    with run_folder.locked(tmp_path):
        refused = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert "another process is training this run" in refused.stderr
    assert subprocess.run(command, cwd=root).returncode == 0


def test_metrics_past_a_step_are_dropped_and_a_torn_last_line_with_them(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": n / 3} for n in range(1, 8)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 8, "lo')
    assert run_folder.read_metrics(tmp_path) == rows
    run_folder.drop_metrics_after(tmp_path, 5)
    assert run_folder.read_metrics(tmp_path) == rows[:5]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    run_folder.drop_metrics_after(tmp_path, 9)
    assert run_folder.read_metrics(tmp_path) == [{"step": 1}, {"step": 3}]


@pytest.mark.parametrize(
    "line", [b"[1, 2]", b'{"loss": 1}', b'{"step": null}', b"\xff\xfe", b"7", b"[" * 100_000]
)
def test_a_line_that_is_no_row_costs_no_other(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    run_folder.drop_metrics_after(tmp_path, 9)
    assert run_folder.read_metrics(tmp_path) == [{"step": 1}, {"step": 3}]


def test_only_what_does_not_change_the_result_may_change_on_resume() -> None:
    run_folder.check_resumable(Path("r"), ["max_steps=9", "wandb.mode=offline", "workers=0"])
    for word in (
        "model.layers=3",
        "model=tiny",
        "seed=2",
        "data.path=x",
        "seq_len=9",
        "++attention.options.a=1",
    ):
        with pytest.raises(ValueError, match=word.lstrip("+").split("=")[0]):
            run_folder.check_resumable(Path("r"), [word])
