"""`watch` shows each row of a run that another process trains, until that process ends."""

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from longctx.report import run_view
from longctx.report.run_view import watch
from longctx.runs import run_folder
from longctx.runs.metrics_file import Tail
from tests.report.run_files import make, step


def test_watch_follows_until_the_process_ends(tmp_path, capsys, monkeypatch):
    rows = [step(1), step(2)]
    lock = {"kernel": "hopper", "machine": {"device": "NVIDIA H200"}}
    folder = make(tmp_path / "a", rows, '{"step": 3, ', "devices: 2", lock=lock)

    def train() -> Iterator[None]:
        with run_folder.locked(folder), open(folder / "metrics.jsonl", "a") as file:
            yield
            file.write(json.dumps(step(3)).removeprefix('{"step": 3, ') + "\n")
            file.flush()
            yield
            later = [step(n, seconds=360.0 * n) for n in range(4, 21)]
            file.write("".join(json.dumps(row) + "\n" for row in later))
        yield

    training = train()
    next(training)
    # Each pause of watch is a part of the run
    monkeypatch.setattr(run_view, "time", SimpleNamespace(sleep=lambda _: next(training)))
    watch(folder, price=2.0)
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [str(n) for n in range(2, 21)]
    assert "loss 0.2500" in lines[-1]
    costs = ("2 × NVIDIA H200", "kernel hopper", "GPU hours 4.00", "cost 8.00 at 2.0 an hour")
    assert last.startswith("finished") and all(part in last for part in costs)


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
