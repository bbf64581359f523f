"""`watch` shows each row of a run that another process trains, until that process ends."""

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from longctx.report import run_view
from longctx.runs import run_folder
from tests.report.run_files import make, step


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
    run_view.watch(folder)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [str(n) for n in range(2, 21)]
    assert "loss 0.2500" in lines[-2]
    assert lines[-1].startswith("finished  hardware GPU")


def test_watch_of_a_folder_that_is_deleted_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="/r"):
        list(run_view.following(tmp_path / "r", run_view.Tail(tmp_path / "r"), []))


def test_watch_starts_again_if_the_file_is_replaced(tmp_path):
    folder = make(tmp_path / "a", [step(1), step(2), step(3)])
    tail = run_view.Tail(folder)
    assert [row["step"] for row in tail.rows()] == [1, 2, 3]
    assert tail.rows() == []
    for steps in ([2], [4, 5, 6, 7]):
        (folder / "new").write_text("".join(json.dumps(step(n)) + "\n" for n in steps))
        os.replace(folder / "new", folder / "metrics.jsonl")
        assert [row["step"] for row in tail.rows()] == steps


def test_watch_needs_a_run(tmp_path):
    with pytest.raises(ValueError, match="no metrics yet"):
        run_view.watch(make(tmp_path / "empty", rows=[]))
    with pytest.raises(FileNotFoundError, match="none: no such folder"):
        run_view.watch(tmp_path / "none")
