"""The files next to a run's rows: evaluations, pass keys, kernel locks, whoever wrote them; and
`watch` shows each row of a run that another process trains, until that process ends.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longctx import cli
from longctx.report import run_view
from longctx.report.compare import described, lock_differences, table_of
from longctx.report.run_view import RunRecord, watch
from longctx.runs import run_folder
from longctx.runs.metrics_file import Tail
from tests.report.run_files import compare, make, step

GRID = {"lengths": [64, 128], "depths": [0, 0.5, 1], "accuracy": [[1, 1, 1], [0.25, 0.5, 0]]}
MAPS = {"kinds": {"needle": GRID}}


def evaluated(folder: Path, content: Any) -> Path:
    """A run with one evaluation."""
    (make(folder) / "eval").mkdir()
    (folder / "eval" / "val-x.json").write_text(json.dumps(content))
    return folder


def test_validations_are_shown(tmp_path):
    validation = {"step": 1, "tokens_seen": 100, "val_loss": 2.0}
    validation |= {f"val_loss_by_position/{2**b}": 5.0 - b for b in range(4)}
    folder = make(tmp_path / "a", [step(1), validation])
    run = RunRecord(folder, 100)
    assert run.positions == {"x": [1, 2, 4, 8], "y": [5.0, 4.0, 3.0, 2.0]}


def test_each_kind_of_evaluation_is_shown(tmp_path, capsys):
    rows = [{"context": 32, "loss": 2.0}, {"context": 256, "loss": 1.5}]
    total = {"tokens": 9, "perplexity": 3.5, "word_perplexity": 77.25, "standard_error": 0.01}
    content = {"context": 256, "stride": 8, "total": total, "by_context": rows}
    folder = evaluated(tmp_path / "a", content)
    scores = {"acc,none": 0.25, "acc_stderr,none": 0.1, "em,strict": 0.5}
    tasks = {"context": 2048, "results": {"arc": scores}}
    scores = {"niah_single_2": [1.0, 1.0], "qa_1": [0.5, 0.5]}
    ruler = {"ruler": {"lengths": [512, 2048], "scores": scores}}
    for name, other in (("passkey.json", MAPS), ("tasks.json", tasks), ("ruler.json", ruler)):
        (folder / "eval" / name).write_text(json.dumps(other))
    run = RunRecord(folder, 100)
    assert described(run)["contexts"] == {"x": [32, 256], "y": [2.0, 1.5]}
    table = table_of([run], None)
    cells = dict(zip(table.headings, table.rows[0], strict=True))
    expected = {
        "context trained at": "64, evaluated at 256",
        "val-x: perplexity": "3.5000 ± 0.035",
        "val-x: word_perplexity": "77.2500",
        "tasks: arc/em (strict)": "0.5000",
        "passkey: needle/64": "1.0000",
        "passkey: needle/128": "0.2500",
        "ruler: ruler/qa_1/2048": "0.5000",
        "ruler: ruler/mean/512": "0.7500",
    }
    assert {heading: cells[heading] for heading in expected} == expected


SHORT = '{"kinds": {"a": {"lengths": [1], "depths": [0], "accuracy": []}}}'


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("eval/x.json", text) for text in (SHORT, SHORT.replace("[]", "[[NaN]]"), "[" * 10**5)),
        *(("kernel.lock.json", text) for text in ("{", "[" * 10**5)),
        ("metrics.jsonl", json.dumps(step(21, loss=10**400))),
        ("config.yaml", "max_steps: 20\nseq_len: [64]"),
        ("checkpoints/step-00000001.ckpt/checkpoint.json", "[]"),  # only its data is unknown
    ],
    ids=range(8),
)
def test_what_a_file_raises_leaves_out_its_run(tmp_path, capsys, file, content):
    broken = evaluated(tmp_path / "a", MAPS)
    (broken / file).parent.mkdir(parents=True, exist_ok=True)
    (broken / file).write_text(content)
    compare([broken, make(tmp_path / "b")], tmp_path / "x.html")
    error = capsys.readouterr().err
    is_shown = file.startswith("checkpoints")
    assert error.count(f"note: left out: {broken}") == (not is_shown)
    assert is_shown or error.count("\n") == 1
    if not is_shown:
        with pytest.raises(ValueError, match=str(broken)):
            compare([broken], tmp_path / "x.html")


def test_watch_is_one_line_for_a_broken_file(tmp_path, refused):
    folder = make(tmp_path / "a")
    (folder / "kernel.lock.json").write_text("{")
    refused(cli.main(["watch", str(folder)]), str(folder))


@pytest.mark.parametrize("file", ["eval/val-x.json", "metrics.jsonl", "config.yaml"])
def test_a_fifo_leaves_out_its_run(file, tmp_path, capsys):
    broken = evaluated(tmp_path / "a", MAPS)
    (broken / file).unlink()
    os.mkfifo(broken / file)
    compare([broken, make(tmp_path / "b")], tmp_path / "x.html")
    assert f"left out: {broken}" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["config.yaml", "metrics.jsonl", "eval", "tokenizer.json"])
@pytest.mark.parametrize("dangles", [False, True])
def test_links_out_of_a_run_are_not_followed(tmp_path, capsys, file, dangles):
    runs = [evaluated(tmp_path / name, MAPS) for name in "ab"]
    (runs[0] / "tokenizer.json").write_text("{}")
    shutil.move(runs[0] / file, tmp_path / "secret")
    (runs[0] / file).symlink_to(tmp_path / ("none" if dangles else "secret"))
    compare(runs, tmp_path / "x.html")
    error = capsys.readouterr().err
    # A link to no folder is no evaluation
    assert (f"left out: {runs[0]}" in error) != (file == "eval" and dangles)
    if file in ("config.yaml", "metrics.jsonl"):
        with pytest.raises(ValueError, match=str(runs[0])):
            watch(runs[0])


def test_locks_that_differ_are_a_note(tmp_path, capsys):
    lock = {"backend": "flash", "machine": {"torch": "2.13.0"}, "fingerprint": {"out": "b"}}
    newer = lock | {"machine": {"torch": "2.14.0"}}
    other_length = lock | {"fingerprint": {"out": "c"}}
    folders = []
    for name, content in (("a", lock), ("b", newer), ("c", other_length), ("d", None)):
        folders.append(make(tmp_path / name, config=f"seq_len: {128 if name == 'c' else 64}"))
        if content:
            (folders[-1] / "kernel.lock.json").write_text(json.dumps(content))
    compare(folders, tmp_path / "x.html")
    notes = [line for line in capsys.readouterr().err.splitlines() if "kernel locks" in line]
    assert len(notes) == 1
    for part in ("flash", " torch: ", "2.13.0 (a, c)", "2.14.0 (b)"):
        assert part in notes[0]
    runs = [RunRecord(folder, 100) for folder in folders]
    runs[2].config["seq_len"] = 64
    assert ["fingerprint" in note for note in lock_differences(runs)] == [False, True]


def test_watch_follows_until_the_process_ends(tmp_path, capsys, monkeypatch):
    folder = make(tmp_path / "a", [step(1), step(2)], tail='{"step": 3, ')

    def train() -> Iterator[None]:
        with run_folder.locked(folder), open(folder / "metrics.jsonl", "a") as file:
            yield
            file.write(json.dumps(step(3)).removeprefix('{"step": 3, ') + "\n")
            file.flush()
            yield
            file.write("".join(json.dumps(step(n)) + "\n" for n in range(4, 21)))
        yield

    training = train()
    next(training)
    # Each pause of watch is a part of the run
    monkeypatch.setattr(run_view, "time", SimpleNamespace(sleep=lambda _: next(training)))
    watch(folder)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [str(n) for n in range(2, 21)]
    assert "loss 0.2500" in lines[-2]
    assert lines[-1].startswith("finished  hardware GPU")


def test_watch_starts_again_if_the_file_is_replaced(tmp_path):
    folder = make(tmp_path / "a", [step(1), step(2), step(3)])
    tail = Tail(folder)
    assert [row["step"] for row in tail.records()] == [1, 2, 3]
    assert tail.records() == []
    for steps in ([2], [4, 5, 6, 7]):
        (folder / "new").write_text("".join(json.dumps(step(n)) + "\n" for n in steps))
        os.replace(folder / "new", folder / "metrics.jsonl")
        assert [row["step"] for row in tail.records()] == steps


def test_watch_needs_a_run(tmp_path):
    with pytest.raises(ValueError, match="no metrics yet"):
        watch(make(tmp_path / "empty", rows=[]))
    with pytest.raises(FileNotFoundError, match="none: no such folder"):
        watch(tmp_path / "none")
