"""What lies beside a run's rows: evaluations, maps of facts, kernel locks, whoever wrote them."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from longctx.report.compare import compare
from longctx.report.locks import kernel_lock, lock_differences
from longctx.report.page import described
from longctx.report.run_view import curves, read
from longctx.report.watch import watch
from longctx.runs.evaluations import read_evaluations

GRID = {"lengths": [64, 128], "depths": [0, 0.5, 1], "accuracy": [[1, 1, 1], [0.25, 0.5, 0]]}
LOCK = {
    "format": 1,
    "backend": "flash",
    "kernel": "triton-portable",
    "machine": {"torch": "2.13.0", "triton": "3.7.1"},
    "sources": {"portable.py": "a" * 64},
    "compiled": {"forward": {"BLOCK_M": 128}},
    "fingerprint": {"out": "b" * 64},
}


def make(folder: Path, lock: dict | None = None, seq_len: int = 64, backend: str = "flash") -> Path:
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"seq_len: {seq_len}\nmax_steps: 3\nattention: {{backend: {backend}}}\n"
    )
    parts = {
        "forward_ms": 3.0,
        "backward_ms": 5.0,
        "optimizer_ms": 1.0,
        "data_wait_ms": 0.5,
        "ms_per_step": 10.0,
    }
    rows = [
        {
            "step": n,
            "tokens_seen": 64 * n,
            "loss": 2.0,
            "seconds": n,
            "tokens_per_second": 9.0,
            **parts,
        }
        for n in (1, 2, 3)
    ]
    positions = {f"val_loss_by_position/{2**b}": 5.0 - b for b in range(4)}
    facts = {"facts_found/needle/64": 0.25, "facts_found/needle/128": 0.5}
    rows.append(
        {
            "step": 3,
            "tokens_seen": 192,
            "val_loss": 2.0,
            "val_perplexity": 7.4,
            **positions,
            **facts,
        }
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if lock:
        (folder / "kernel.lock.json").write_text(json.dumps(lock))
    return folder


def test_positions_and_the_parts_of_a_step_come_from_the_rows(tmp_path):
    run = described(read(make(tmp_path / "a"), 100))
    assert run["positions"] == {"x": [1, 2, 4, 8], "y": [5.0, 4.0, 3.0, 2.0]}
    assert run["split"] == {
        "forward": 3.0,
        "backward": 5.0,
        "optimizer": 1.0,
        "data wait": 0.5,
        "rest": 0.5,
    }


def test_recall_of_validation_is_shown(tmp_path, capsys):
    compare([make(tmp_path / "a")], tmp_path / "x.html")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "last validation" in line)
    assert line.split() == ["a", "last", "validation", "needle", "25%", "50%"]


def test_passkey_maps_in_either_place_and_form(tmp_path):
    folder = make(tmp_path / "a")
    (folder / "passkey.json").write_text(json.dumps(GRID))
    (folder / "eval" / "passkey-x.json").write_text(
        json.dumps({"kinds": {"needle": GRID, "passkey": GRID}})
    )
    evaluations = read_evaluations(folder)
    assert (evaluations.perplexities, evaluations.tasks, evaluations.unreadable) == ([], [], [])
    assert [grid["kind"] for grid in evaluations.passkeys] == ["needle", "passkey", "passkey"]
    assert evaluations.passkeys[0]["accuracy"] == GRID["accuracy"]


@pytest.mark.parametrize(
    "content",
    [
        '{"kinds": {"a": {"lengths": [1], "depths": [0], "accuracy": []}}}',
        '{"lengths": [1], "depths": [0, 1], "accuracy": [[1]]}',
        '{"lengths": [1], "depths": [0], "accuracy": [[NaN]]}',
        '{"lengths": [1], "depths": [0], "accuracy": [[1e999]]}',
        '{"context": 1, "stride": 1, "total": {"tokens": 1, "perplexity": Infinity}}',
        '{"context": 1, "stride": 1, "total": {"tokens": 1}, "by_position": [{"first": 1}]}',
        f'{{"lengths": [1], "depths": [0], "accuracy": [[{10**400}]]}}',
        '{"kinds": []}',
        "[]",
        '{"kinds',
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_malformed_evaluation_is_left_out_with_a_note(tmp_path, capsys, content):
    folder = make(tmp_path / "a")
    (folder / "eval" / "x.json").write_text(content)
    compare([folder], tmp_path / "x.html")
    assert "x.json: not an evaluation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("eval/x.json", "x.json: not an evaluation"),
        ("metrics.jsonl", "metrics.jsonl: not a regular file"),
    ],
)
def test_a_fifo_is_left_out_with_a_note(tmp_path, capsys, file, message):
    runs = [make(tmp_path / name) for name in "ab"]
    (runs[0] / file).unlink(missing_ok=True)
    os.mkfifo(runs[0] / file)
    compare(runs, tmp_path / "x.html")
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("file", ["config.yaml", "metrics.jsonl", "eval", "tokenizer.json"])
def test_links_out_of_a_run_are_not_followed(tmp_path, capsys, file):
    runs = [make(tmp_path / name) for name in "ab"]
    for run in runs:
        (run / "tokenizer.json").write_text("{}")
        (run / "eval" / "x.json").write_text(json.dumps(GRID))
    shutil.move(runs[0] / file, tmp_path / "secret")
    (runs[0] / file).symlink_to(tmp_path / "secret")
    compare(runs, tmp_path / "x.html")
    error = capsys.readouterr().err
    if file == "eval":
        assert "x.json: not an evaluation" in error
    elif file == "tokenizer.json":
        assert [bool(read(run, 100).tokenizer) for run in runs] == [False, True]
    else:
        assert f"{file}: a link" in error
        with pytest.raises(ValueError, match=f"{file}: a link"):
            watch(runs[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", 10**400),
        ("loss", [1]),
        ("mfu", "high"),
        ("tokens_seen", 10**400),
        ("val_loss_by_position/x", 1.0),
    ],
)
def test_run_with_an_odd_number_is_left_out(tmp_path, capsys, key, value):
    folders = [make(tmp_path / name) for name in "ab"]
    with open(folders[0] / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "tokens_seen": 192, key: value}) + "\n")
    compare(folders, tmp_path / "x.html")
    printed = capsys.readouterr()
    assert f"left out: {folders[0]}" in printed.err and f"{key}=" in printed.err
    assert "finished" in printed.out


def test_curves_of_an_evaluation_reach_the_page(tmp_path, capsys):
    folder = make(tmp_path / "a")
    total = {"tokens": 9, "perplexity": 3.5, "word_perplexity": 77.25, "bits_per_byte": 1.5}
    rows = [{"context": 32, "loss": 2.0}, {"context": 256, "loss": 1.5}]
    content = {"context": 256, "stride": 8, "total": total, "by_context": rows, "by_position": []}
    (folder / "eval" / "x.json").write_text(json.dumps(content))
    run = read(folder, 100)
    assert described(run)["contexts"] == {"x": [32, 256], "y": [2.0, 1.5]}
    assert run.longest == "64, evaluated at 256"
    compare([folder], tmp_path / "x.html")
    assert "77.25" in capsys.readouterr().out


def test_scores_of_tasks_are_a_table(tmp_path, capsys):
    folder = make(tmp_path / "a")
    values = {
        "alias": "x",
        "acc,none": 0.25,
        "acc_stderr,none": 0.1,
        "em,strict": 0.5,
        "4096,none": -1,
    }
    (folder / "eval" / "tasks.json").write_text(
        json.dumps({"context": 2048, "results": {"arc": values}})
    )
    assert [(score["name"], score["value"]) for score in read(folder, 9).evaluations.tasks] == [
        ("arc acc", 0.25),
        ("arc em (strict)", 0.5),
    ]
    compare([folder], tmp_path / "x.html")
    assert "arc em (strict)" in capsys.readouterr().out


def test_lock_is_shown_by_short_hashes_and_versions(tmp_path):
    lock = kernel_lock(make(tmp_path / "a", LOCK))
    assert lock.keys() == {"kernel", "torch", "triton", "sources", "fingerprint"}
    assert (lock["kernel"], lock["torch"], len(lock["sources"])) == (
        "triton-portable",
        "2.13.0",
        10,
    )
    assert kernel_lock(make(tmp_path / "b")) == {}


def test_locks_that_differ_are_a_warning_within_a_backend(tmp_path, capsys):
    newer = LOCK | {"machine": {"torch": "2.14.0", "triton": "3.7.1"}}
    longer = LOCK | {"fingerprint": {"out": "c" * 64}, "compiled": {}}
    folders = [
        make(tmp_path / "a", LOCK),
        make(tmp_path / "b", newer),
        make(tmp_path / "c", longer, seq_len=128),
        make(tmp_path / "d", LOCK | {"kernel": "x", "backend": "sdpa"}, backend="sdpa"),
        make(tmp_path / "e"),
    ]
    compare(folders, tmp_path / "x.html")
    printed = capsys.readouterr()
    (warning,) = printed.err.splitlines()
    assert warning.startswith("warning: ")
    for part in ("flash", " torch: ", "2.13.0 (a, c)", "2.14.0 (b)"):
        assert part in warning
    assert "kernel locks" in printed.out
    runs = [read(folder, 100) for folder in folders]
    runs[2].config["seq_len"] = 64
    warnings = lock_differences((run.label, run.config, run.lock) for run in runs)
    assert ["fingerprint" in warning for warning in warnings] == [False, True]


@pytest.mark.parametrize(
    "content", ["{", "[]", "3", '"x"', pytest.param("[" * 100_000, id="nested")]
)
def test_broken_lock_is_a_note(tmp_path, capsys, content):
    folder = make(tmp_path / "a")
    (folder / "kernel.lock.json").write_text(content)
    compare([folder], tmp_path / "x.html")
    assert "kernel.lock.json" in capsys.readouterr().err


def test_a_lock_holds_anything(tmp_path):
    lock = {
        "machine": {"a\x1b": math.pi},
        "deep": {"x": [1, {"y": None}]},
        "list": [1],
        "kernel": None,
    }
    assert kernel_lock(make(tmp_path / "a", lock))["a\x1b"] == str(math.pi)


def test_the_standard_error_of_a_perplexity_is_a_band_around_its_curve() -> None:
    rows = [
        {"step": n, "tokens_seen": 64 * n, "val_perplexity": 20.0 / n, "val_loss_error": error}
        for n, error in ((1, 0.25), (2, None), (4, 0.5))
    ]
    curve = curves(rows, 60)["val_perplexity"]
    assert curve["lo"] == pytest.approx([15.0, 10.0, 2.5])
    assert curve["hi"] == pytest.approx([25.0, 10.0, 7.5])
    plain = [{key: row[key] for key in ("step", "tokens_seen", "val_perplexity")} for row in rows]
    assert "lo" not in curves(plain, 60)["val_perplexity"]
