"""What is printed and drawn is what the files hold, whoever named the runs and however they ended."""

import fcntl
import json
import math
import os
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longctx.cli import main
from longctx.report import watch
from longctx.report.compare import differing
from longctx.report.runs import read, reduced

HOSTILE = "<!--<script>&\x1b[31m\u2028<img src=x onerror=alert(1)>"


def step(number: int, **more: float) -> dict[str, float]:
    return {
        **{
            "step": number,
            "tokens_seen": 100 * number,
            "loss": 5 / number,
            "grad_norm": 1.0,
            "lr": 1e-3,
        },
        **{
            "tokens_per_second": 1000.0 + number,
            "ms_per_step": 9.0,
            "memory_peak_gib": 2.5,
            "seconds": 0.1 * number,
        },
        **more,
    }


def make(
    folder: Path, rows: list[dict[str, float]] | None = None, tail: str = "", config: str = ""
) -> Path:
    """A run of 20 steps as train.py leaves it; `config` stands for the one line that may differ."""
    folder.mkdir(parents=True)
    about = f"{config or 'lr: 0.001'}\nmax_steps: 20\nseq_len: 64\nname: {folder.parent.name}\nattention: {{backend: flash}}\n"
    (folder / "config.yaml").write_text(about)
    last = {"step": 20, "tokens_seen": 2000, "val_loss": 1.0, "val_perplexity": math.e}
    rows = [*(step(n) for n in range(1, 21)), last] if rows is None else rows
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def compare(*words: object) -> int:
    return main(["compare", *map(str, words)])


class Page(HTMLParser):
    """What a browser makes of a page: its elements, and the text of the script elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def page_data(path: Path) -> dict:
    return json.loads(Page(path.read_text()).scripts[0], parse_constant=pytest.fail)


def test_figures_come_from_the_rows(tmp_path, capsys):
    assert compare(make(tmp_path / "a"), f"out={tmp_path}/x.html") == 0
    printed = capsys.readouterr().out
    for text in ("2,000", "0.2500", "2.72", "1,011", "2.50", "finished", "x.html"):
        assert text in printed
    assert "what differs" not in printed
    run = page_data(tmp_path / "x.html")["runs"][0]
    assert run["curves"]["loss"]["y"] == [float(f"{5 / n:.5g}") for n in range(1, 21)]
    assert run["curves"]["loss"]["t"] == [100 * n for n in range(1, 21)]
    assert run["curves"]["val_perplexity"]["s"] == [2.0]
    assert "mfu" not in run["curves"]


def test_only_keys_that_differ_are_named(tmp_path):
    configs = {"a": "lr: 0.001\nwindow: true", "b": "lr: 0.002\nwindow: true", "c": "lr: 0.001"}
    runs = [read(make(tmp_path / name, config=config), 100) for name, config in configs.items()]
    assert differing(runs) == ["lr", "window"]
    assert differing(runs[:2]) == ["lr"]
    assert differing(runs[:1]) == []


def test_the_best_of_each_column_is_marked(tmp_path):
    slow = [step(n, tokens_per_second=10.0) for n in range(1, 21)]
    assert (
        compare(make(tmp_path / "slow", slow), make(tmp_path / "fast"), f"out={tmp_path}/x.html")
        == 0
    )
    table = page_data(tmp_path / "x.html")["tables"][0]
    speed = table["headings"].index("tokens/s")
    assert [1, speed] in table["best"]
    assert all(column != table["headings"].index("loss") for _, column in table["best"])


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ('{"step": 21, "tok', "the last line of"),
        ('{"step": 21, "tok\nnull\n', "2 of 23 lines"),
        ("\x00\x00", "the last line"),
    ],
)
def test_a_half_written_line_is_left_out_and_said(tmp_path, capsys, tail, said):
    assert compare(make(tmp_path / "a", tail=tail), f"out={tmp_path}/x.html") == 0
    printed = capsys.readouterr()
    assert said in printed.err
    assert "0.2500" in printed.out
    assert said in page_data(tmp_path / "x.html")["notes"][0]


def test_how_a_run_ended(tmp_path):
    rows = [step(n) for n in range(1, 13)]
    assert read(make(tmp_path / "killed", rows), 100).ended == "stopped at step 12 of 20"
    folder = make(tmp_path / "going", rows)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert read(folder, 100).ended == "training, step 12 of 20"
    os.close(descriptor)
    assert read(folder, 100).ended == "stopped at step 12 of 20"


@pytest.mark.parametrize(
    ("nan", "inf"), [(None, None), (math.nan, math.inf)]
)  # null, and as runs once wrote it
def test_a_loss_that_is_no_number_is_shown_and_not_drawn(tmp_path, capsys, nan, inf):
    folders = [make(tmp_path / name, [step(1), step(2, loss=nan, grad_norm=inf)]) for name in "ab"]
    assert compare(*folders, make(tmp_path / "c"), f"out={tmp_path}/x.html") == 0
    assert "nan" in capsys.readouterr().out
    assert page_data(tmp_path / "x.html")["runs"][0]["curves"]["loss"]["y"] == [5.0]
    assert (
        compare(folders[0], make(tmp_path / "d", [step(1, loss=nan)]), f"out={tmp_path}/x.html")
        == 0
    )


def test_evaluations_are_shown(tmp_path, capsys):
    folder = make(tmp_path / "a")
    (folder / "eval").mkdir()
    total = {"tokens": 77, "perplexity": 12.3456, "bits_per_byte": None}
    (folder / "eval" / "val-64.json").write_text(
        json.dumps({"context": 64, "stride": 32, "total": total})
    )
    (folder / "eval" / "cut.json").write_text('{"context"')
    assert compare(folder, f"out={tmp_path}/x.html") == 0
    printed = capsys.readouterr()
    assert "12.346" in printed.out
    assert "cut.json" in printed.err


def test_hostile_names_stay_text(tmp_path, capsys):
    plain, hostile = (
        make(tmp_path / "plain"),
        make(tmp_path / HOSTILE, config="lr: '</script ><script>alert(1)</script >'"),
    )
    closing = make(tmp_path / "<" / "script><script>alert(2)<" / "script>")
    assert compare(plain, hostile, closing, f"out={tmp_path}/x.html") == 0
    assert compare(plain, f"out={tmp_path}/y.html") == 0
    text = (tmp_path / "x.html").read_text()
    assert Page(text).elements == Page((tmp_path / "y.html").read_text()).elements
    assert "alert(1)" in Page(text).scripts[0] and not set("<>&") & set(Page(text).scripts[0])
    data = page_data(tmp_path / "x.html")
    assert data["runs"][1]["label"] == HOSTILE.replace("\x1b", "\ufffd").replace("\u2028", "\ufffd")
    assert "\x1b" not in capsys.readouterr().out


def test_the_page_asks_for_nothing_and_makes_no_html_of_data(tmp_path):
    assert compare(make(tmp_path / "a"), f"out={tmp_path}/x.html") == 0
    text = (tmp_path / "x.html").read_text()
    assert not [about for _, about in Page(text).elements if {"src", "href"} & about.keys()]
    assert "default-src 'none'" in text
    assert not [
        word
        for word in ("innerHTML", "outerHTML", "document.write", "eval(", "http://", "https://")
        if word in text
    ]


def test_runs_of_one_name_are_told_apart_and_none_is_shown_twice(tmp_path):
    first, second = make(tmp_path / "x" / "a"), make(tmp_path / "y" / "a")
    assert compare(first, second, first / ".." / "a", f"out={tmp_path}/x.html") == 0
    assert [run["label"] for run in page_data(tmp_path / "x.html")["runs"]] == [
        str(first),
        str(second),
    ]


def test_mistakes_are_one_line_and_leave_nothing(tmp_path, refused):
    run, empty = make(tmp_path / "runs" / "a"), make(tmp_path / "empty", rows=[])
    (tmp_path / "bare").mkdir()
    before = sorted(tmp_path.rglob("*"))
    out = f"out={tmp_path}/x.html"
    for words, said in [
        (["compare", tmp_path / "none", out], "none: no such folder"),
        (["compare", run, tmp_path / "none", out], "none: no such folder"),
        (["compare", tmp_path / "bare", out], "no config.yaml"),
        (["compare", tmp_path / "runs", out], "it holds runs"),
        (["compare", empty, out], "no metrics yet"),
        (["compare", run, f"out={tmp_path}"], "a folder"),
        (["compare", run, f"out={tmp_path}/no/x.html"], "no file can be made"),
        (["compare", run, "outt=x"], "outt is not a key; did you mean out?"),
        (["compare", out], "RUNS is missing"),
        (["compare", run, "--fast"], "--fast: not an option"),
        (["watch", empty], "no metrics yet"),
        (["watch", tmp_path / "none"], "no such folder"),
        (["watch"], "RUN is missing"),
        (["look", run], "look: not a command"),
    ]:
        refused(main([str(word) for word in words]), said)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_run_is_left_out_and_said_where_others_are_runs(tmp_path, capsys):
    paths = [make(tmp_path / "a"), make(tmp_path / "b", rows=[])]
    assert compare(*paths, f"out={tmp_path}/x.html") == 0
    assert "left out" in capsys.readouterr().err
    assert len(page_data(tmp_path / "x.html")["runs"]) == 1


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch, capsys):
    run, out = make(tmp_path / "a"), tmp_path / "x.html"
    out.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert compare(run, f"out={out}") == 2
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "x.html"]


@pytest.mark.parametrize("rows", [1, 99, 100, 101, 1234])
def test_a_reduced_curve_keeps_extremes_and_mean(rows):
    values = [math.sin(n) for n in range(rows)]
    curve = reduced(list(range(rows)), [float(n) for n in range(rows)], values, 100)
    assert len(curve["y"]) == len(curve["t"]) == len(curve["s"]) <= 100
    assert min(curve.get("lo", curve["y"])) == pytest.approx(min(values), rel=1e-4)
    assert max(curve.get("hi", curve["y"])) == pytest.approx(max(values), rel=1e-4)
    assert curve["t"] == sorted(curve["t"])


def test_many_long_runs_take_little_space(tmp_path):
    """A tenth of 50 runs × 10,000 rows, in at most 10 MB."""
    text = "".join(json.dumps(step(n, loss=math.sin(n) / 3)) + "\n" for n in range(1, 1001))
    folders = [make(tmp_path / f"{number}", rows=[], tail=text) for number in range(50)]
    assert compare(*folders, f"out={tmp_path}/x.html") == 0
    assert (tmp_path / "x.html").stat().st_size < 10e6
    assert all(
        len(curve["y"]) <= 714
        for run in page_data(tmp_path / "x.html")["runs"]
        for curve in run["curves"].values()
    )


def test_start_up_needs_no_torch():
    modules = "longctx.cli, longctx.report.compare, longctx.report.watch"
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "lightning", "wandb", "datasets", "numpy"} & set(loaded)


def test_watch_follows_until_the_process_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watch, "PAUSE", 0.02)
    folder = make(tmp_path / "a", [step(1), step(2)], tail='{"step": 3, ')
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def train() -> None:
        time.sleep(0.2)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(step(3)).removeprefix('{"step": 3, ') + "\n")
            file.flush()
            time.sleep(0.1)
            file.write("".join(json.dumps(step(n)) + "\n" for n in range(4, 21)))
        os.close(descriptor)

    thread = threading.Thread(target=train)
    thread.start()
    assert main(["watch", str(folder)]) == 0
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [str(n) for n in range(2, 21)]
    assert "loss 0.2500" in lines[-2]
    assert lines[-1] == "finished"


def test_watch_of_a_folder_that_is_deleted_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="r: the folder is gone"):
        list(watch.following(tmp_path / "r", watch.Tail(tmp_path / "r"), []))


def test_watch_starts_again_where_the_file_was_replaced(tmp_path):
    folder = make(tmp_path / "a", [step(1), step(2), step(3)])
    tail = watch.Tail(folder)
    assert [row["step"] for row in tail.rows()] == [1, 2, 3]
    assert tail.rows() == []
    for steps in ([2], [4, 5, 6, 7]):
        (folder / "new").write_text("".join(json.dumps(step(n)) + "\n" for n in steps))
        os.replace(folder / "new", folder / "metrics.jsonl")
        assert [row["step"] for row in tail.rows()] == steps


def test_a_sparkline_goes_from_the_largest_to_the_least():
    assert watch.sparkline([3.0, 2.0, 1.0]) == "█▅▁  3 → 1"
    assert watch.sparkline([1.0]) == "▁  1 → 1"
    assert len(watch.sparkline([float(n) for n in range(999)]).split()[0]) == 40
    assert watch.sparkline([]) == ""
