"""What lies beside a run's rows: evaluations, passkey maps, kernel locks, whoever wrote them."""

import json
import math
from pathlib import Path

import pytest

from longctx.cli import main
from longctx.report.findings import evaluations, kernel_lock, lock_differences
from longctx.report.page import described
from longctx.report.runs import read

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
    found = {"facts_found/needle/64": 0.25, "facts_found/needle/128": 0.5}
    rows.append(
        {
            "step": 3,
            "tokens_seen": 192,
            "val_loss": 2.0,
            "val_perplexity": 7.4,
            **positions,
            **found,
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


def test_facts_that_validation_found_are_told(tmp_path, capsys):
    assert main(["compare", str(make(tmp_path / "a")), f"out={tmp_path}/x.html"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "last validation" in line)
    assert line.split() == ["a", "last", "validation", "needle", "25%", "50%"]


def test_passkey_maps_in_either_place_and_form(tmp_path):
    folder = make(tmp_path / "a")
    (folder / "passkey.json").write_text(json.dumps(GRID))
    (folder / "eval" / "passkey-x.json").write_text(
        json.dumps({"kinds": {"needle": GRID, "passkey": GRID}})
    )
    scores, maps, done, wrong = evaluations(folder)
    assert (scores, done, wrong) == ([], [], [])
    assert [found["kind"] for found in maps] == ["needle", "passkey", "passkey"]
    assert maps[0]["accuracy"] == GRID["accuracy"]


@pytest.mark.parametrize(
    "content",
    [
        '{"kinds": {"a": {"lengths": [1], "depths": [0], "accuracy": []}}}',
        '{"lengths": [1], "depths": [0, 1], "accuracy": [[1]]}',
        '{"lengths": [1], "depths": [0], "accuracy": [[NaN]]}',
        '{"lengths": [1], "depths": [0], "accuracy": [[1e999]]}',
        '{"context": 1, "stride": 1, "total": {"tokens": 1, "perplexity": Infinity}}',
        '{"context": 1, "stride": 1, "total": {"tokens": 1}, "by_position": [{"first": 1}]}',
        '{"kinds": []}',
        "[]",
        '{"kinds',
    ],
)
def test_what_is_no_evaluation_is_left_out_and_said(tmp_path, capsys, content):
    folder = make(tmp_path / "a")
    (folder / "eval" / "x.json").write_text(content)
    assert main(["compare", str(folder), f"out={tmp_path}/x.html"]) == 0
    assert "x.json: not an evaluation's JSON, left out" in capsys.readouterr().err


def test_curves_of_an_evaluation_reach_the_page(tmp_path, capsys):
    folder = make(tmp_path / "a")
    total = {"tokens": 9, "perplexity": 3.5, "word_perplexity": 77.25, "bits_per_byte": 1.5}
    rows = [{"context": 32, "loss": 2.0}, {"context": 256, "loss": 1.5}]
    found = {"context": 256, "stride": 8, "total": total, "by_context": rows, "by_position": []}
    (folder / "eval" / "x.json").write_text(json.dumps(found))
    run = read(folder, 100)
    assert described(run)["contexts"] == {"x": [32, 256], "y": [2.0, 1.5]}
    assert run.longest == 256
    assert main(["compare", str(folder), f"out={tmp_path}/x.html"]) == 0
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
    assert [(found["name"], found["value"]) for found in read(folder, 9).tasks] == [
        ("arc acc", 0.25),
        ("arc em (strict)", 0.5),
    ]
    assert main(["compare", str(folder), f"out={tmp_path}/x.html"]) == 0
    assert "arc em (strict)" in capsys.readouterr().out


def test_a_lock_is_told_by_short_hashes_and_versions(tmp_path):
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
    assert main(["compare", *map(str, folders), f"out={tmp_path}/x.html"]) == 0
    printed = capsys.readouterr()
    assert (
        printed.err == "warning: kernel locks of flash differ in torch: 2.13.0 (a, c); 2.14.0 (b)\n"
    )
    assert "kernel locks" in printed.out
    runs = [read(folder, 100) for folder in folders]
    runs[2].config["seq_len"] = 64
    said = lock_differences((run.label, run.config, run.lock) for run in runs)
    assert [line.split(":")[1] for line in said] == [
        " kernel locks of flash differ in torch",
        " kernel locks of flash differ in fingerprint",
    ]


@pytest.mark.parametrize("content", ["{", "[]", "3", '"x"'])
def test_a_broken_lock_is_said(tmp_path, capsys, content):
    folder = make(tmp_path / "a")
    (folder / "kernel.lock.json").write_text(content)
    assert main(["compare", str(folder), f"out={tmp_path}/x.html"]) == 0
    assert "kernel.lock.json cannot be read" in capsys.readouterr().err


def test_a_lock_holds_anything(tmp_path):
    lock = {
        "machine": {"a\x1b": math.pi},
        "deep": {"x": [1, {"y": None}]},
        "list": [1],
        "kernel": None,
    }
    assert kernel_lock(make(tmp_path / "a", lock))["a\ufffd"] == str(math.pi)
