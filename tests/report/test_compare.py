"""What is printed and drawn is what the files hold, whoever named the runs and however they
ended.
"""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longctx import cli
from longctx.report.compare import described, not_ranked
from longctx.report.run_view import RunRecord, reduced
from longctx.runs import run_folder
from longctx.runs.evaluations import write
from tests.report.run_files import compare, make, step

HOSTILE = "<!--<script>&\x1b[31m\u2028<img src=x onerror=alert(1)>"


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
    compare([make(tmp_path / "a")], tmp_path / "x.html")
    printed = capsys.readouterr().out
    for text in ("2,000", "0.2500", "2.72", "1,011", "2.50", "finished", "x.html"):
        assert text in printed
    assert "lr" not in printed.splitlines()[1].split()
    run = page_data(tmp_path / "x.html")["runs"][0]
    assert run["curves"]["loss"]["y"] == [float(f"{5 / n:.5g}") for n in range(1, 21)]
    assert run["curves"]["loss"]["t"] == [100 * n for n in range(1, 21)]
    assert run["curves"]["val_perplexity"]["s"] == [2.0]
    assert "mfu" not in run["curves"]


def test_the_best_of_each_column_is_marked(tmp_path):
    slow = [step(n, tokens_per_second=10.0) for n in range(1, 21)]
    compare([make(tmp_path / "slow", slow), make(tmp_path / "fast")], tmp_path / "x.html")
    table = page_data(tmp_path / "x.html")["table"]
    speed = table["headings"].index("speed (tokens/s)")
    assert [1, speed] in table["best"]
    assert all(column != table["headings"].index("loss") for _, column in table["best"])


@pytest.mark.parametrize("tail", ['{"step": 21, "tok', "\x00\x00"])
def test_half_written_line_is_left_out_with_a_note(tmp_path, capsys, tail):
    compare([make(tmp_path / "a", tail=tail)], tmp_path / "x.html")
    printed = capsys.readouterr()
    assert "1 of 22 lines" in printed.err and "0.2500" in printed.out
    assert "1 of 22 lines" in page_data(tmp_path / "x.html")["notes"][0]


def test_how_a_run_ended(tmp_path):
    folder = make(tmp_path / "a", [step(n) for n in range(1, 13)])
    with run_folder.locked(folder):
        assert RunRecord(folder, 100).ended == "training, step 12 of 20"
    assert RunRecord(folder, 100).ended == "stopped at step 12 of 20"


@pytest.mark.parametrize(("nan", "inf"), [(None, None), (math.nan, math.inf)])
def test_a_loss_that_is_nan_is_shown_undrawn(tmp_path, capsys, nan, inf):
    folders = [make(tmp_path / name, [step(1), step(2, loss=nan, grad_norm=inf)]) for name in "ab"]
    compare([*folders, make(tmp_path / "c")], tmp_path / "x.html")
    assert "nan" in capsys.readouterr().out
    assert page_data(tmp_path / "x.html")["runs"][0]["curves"]["loss"]["y"] == [5.0]
    compare([folders[0], make(tmp_path / "d", [step(1, loss=nan)])], tmp_path / "x.html")


def test_hostile_names_stay_text(tmp_path):
    script = "'</script ><script>alert(1)</script >'"
    settings = f"lr: {script}\nwandb: {{notes: {script}, tags: [{script}]}}"
    plain, hostile = make(tmp_path / "plain"), make(tmp_path / HOSTILE, config=settings)
    (hostile / "kernel.lock.json").write_text(json.dumps({"kernel": script}))
    closing = make(tmp_path / "<" / "script><script>alert(2)<" / "script>")
    compare([plain, hostile, closing], tmp_path / "x.html")
    compare([plain], tmp_path / "y.html")
    text = (tmp_path / "x.html").read_text()
    assert Page(text).elements == Page((tmp_path / "y.html").read_text()).elements
    assert not [about for _, about in Page(text).elements if {"src", "href"} & about.keys()]
    assert "alert(1)" in Page(text).scripts[0] and not set("<>&") & set(Page(text).scripts[0])
    assert page_data(tmp_path / "x.html")["runs"][1]["label"] == HOSTILE
    assert "default-src 'none'" in text
    for word in ("innerHTML", "outerHTML", "document.write", "eval(", "http://", "https://"):
        assert word not in text


def test_no_text_of_a_run_drives_the_terminal(tmp_path, capsys):
    rows = [step(1), {"step": 1, "tokens_seen": 100, "facts_found/\x1b[2J/64": 0.5}]
    folders = [
        make(tmp_path / "a\x1b[31m", rows, tail="{", config='notes: "\\x1b]0;title\\x07"'),
        make(tmp_path / "b", rows, config="notes: plain"),
        tmp_path / "no\x1bfolder",
    ]
    folders[2].mkdir()
    for folder in folders[:2]:
        lock = {"backend": "x", "\x9b1m": folder.name}
        (folder / "kernel.lock.json").write_text(json.dumps(lock))
    for words in (["compare", *map(str, folders), "out=x.html"], ["watch", str(folders[0])]):
        words = [word.replace("out=", f"out={tmp_path}/") for word in words]
        assert cli.main(words) == 0
    assert cli.main(["watch", str(folders[2])]) == 2
    printed = "".join(capsys.readouterr())
    assert [x for x in ("[31m", "[2J", "]0;title", "1m") if x not in printed] == []
    assert not [x for x in printed if not x.isprintable() and x != "\n"]


def test_each_run_is_shown_once_under_its_own_name(tmp_path, capsys):
    first, second = make(tmp_path / "x" / "a"), make(tmp_path / "y" / "a")
    empty = make(tmp_path / "b", rows=[])
    compare([first, second, first / ".." / "a", empty], tmp_path / "x.html")
    assert f"left out: {empty}" in capsys.readouterr().err
    labels = [run["label"] for run in page_data(tmp_path / "x.html")["runs"]]
    assert labels == [str(first), str(second)]


def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path):
    run, empty = make(tmp_path / "runs" / "a"), make(tmp_path / "empty", rows=[])
    (tmp_path / "bare").mkdir()
    before = sorted(tmp_path.rglob("*"))
    page = tmp_path / "x.html"
    for paths, out, part in [
        ([run, tmp_path / "none"], page, "none"),
        ([tmp_path / "bare"], page, "bare"),
        ([tmp_path / "runs"], page, f"{tmp_path}/runs/*"),
        ([empty], page, "empty"),
        ([run], tmp_path / "no" / "x.html", f"out={tmp_path}/no/x.html"),
    ]:
        with pytest.raises((ValueError, OSError), match=re.escape(part)) as error:
            compare(paths, out)
        assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("rows", [1, 99, 100, 101, 1234])
def test_a_reduced_curve_keeps_extremes(rows):
    values = [math.sin(n) for n in range(rows)]
    timed = [{"tokens_seen": n, "seconds": 1.0 * n, "loss": x} for n, x in enumerate(values)]
    curve = reduced(timed, "loss", 100)
    assert len(curve["y"]) == len(curve["t"]) == len(curve["s"]) <= 100
    assert min(curve.get("lo", curve["y"])) == pytest.approx(min(values), rel=1e-4)
    assert max(curve.get("hi", curve["y"])) == pytest.approx(max(values), rel=1e-4)


KTO = "objective: {name: kto}\n"
BY_TOKENIZER = ("data: {tokenizer: null, vocab_size: 9}", "data: {tokenizer: runs/a}")


def test_losses_are_not_ranked_if_files_changed_between_the_runs(tmp_path):
    runs = [RunRecord(make(tmp_path / name), 9) for name in "abc"]
    for run, documents in zip(runs, ("", "d1", "d1"), strict=True):
        run.documents = documents
    assert not not_ranked(runs)
    runs[2].documents = "d2"
    assert "documents" in " ".join(not_ranked(runs))


@pytest.mark.parametrize(
    ("configs", "tokenizers", "is_ranked"),
    [
        (("data: {path: a, cache: x}", "data: {path: a, cache: y}"), "", True),
        (("data: {path: a}", "data: {path: b}"), "", False),
        (("model: {vocab_size: 300}", "model: {vocab_size: 400}"), "", False),
        (("seq_len: 4\nval_rows: 8", "seq_len: 8\nval_rows: 4"), "", True),
        (("seq_len: 4\nval_rows: 8", "seq_len: 4\nval_rows: 1"), "", False),
        (("objective: {name: dpo}", "objective: {name: simpo}"), "", False),
        ((f"{KTO}batch_size: 2", f"{KTO}batch_size: 4"), "", False),
        ((f"{KTO}batch_size: 2\ndevices: 1", f"{KTO}batch_size: 2\ndevices: 2"), "", False),
        (("batch_size: 2", "batch_size: 4"), "", True),
        (BY_TOKENIZER, "aa", True),
        (BY_TOKENIZER, "ab", False),
    ],
)
def test_losses_are_ranked_over_the_same_tokens(tmp_path, capsys, configs, tokenizers, is_ranked):
    folders = []
    for number, config in enumerate(configs):
        rows = [step(n, loss=2.0 + number) for n in range(1, 21)]
        folders.append(make(tmp_path / f"{number}", rows, config=config))
    for folder, text in zip(folders, tokenizers, strict=False):
        (folder / "tokenizer.json").write_text(text)
    compare(folders, tmp_path / "x.html")
    table = page_data(tmp_path / "x.html")["table"]
    assert ([0, table["headings"].index("loss")] in table["best"]) == is_ranked
    assert ("not ranked" in capsys.readouterr().err) != is_ranked


def test_the_curve_over_context_is_of_the_newest_checkpoint_on_its_own_documents(tmp_path):
    folder = make(tmp_path / "a")
    names = [f"val-step-{name}" for name in ("00000012-256", "00000012-512", "00000008-512")]
    for number, name in enumerate(["README.md-step-00000012-512", *names]):
        content = {"context": int(name[-3:]), "stride": 32, "total": {"tokens": 7}}
        content["by_context"] = [{"context": 64, "loss": float(number)}]
        write(content, folder / "eval" / f"{name}.json")
    assert described(RunRecord(folder, 9))["contexts"] == {"x": [64], "y": [2.0]}
