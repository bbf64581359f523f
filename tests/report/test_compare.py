"""What is printed and drawn is what the files hold, whoever named the runs and however they
ended; what runs cost is the product of devices, time and price.
"""

import csv
import json
import math
import os
import re
import shutil

import pytest

from longctx import cli
from longctx.report.compare import (
    POINTS,
    RunRecord,
    cost_of,
    described,
    differing,
    incomparable,
    reduced,
    table_of,
)
from longctx.runs import run_folder
from tests.report.run_files import DATA, compare, make, step

HOSTILE = "<!--<script>&\x1b[31m\u2028<img src=x onerror=alert(1)>"


def test_figures_come_from_the_rows(tmp_path, capsys):
    (run,) = compare([make(tmp_path / "a")], tmp_path / "x.html")["runs"]
    printed = capsys.readouterr().out
    for text in ("2,000", "0.2500", "2.72", "1,011", "2.50", "finished", "x.html"):
        assert text in printed
    assert "lr" not in printed.splitlines()[1].split()
    assert run["curves"]["loss"]["y"] == [float(f"{5 / n:.5g}") for n in range(1, 21)]
    assert run["curves"]["loss"]["t"] == [100 * n for n in range(1, 21)]
    assert run["curves"]["val_perplexity"]["s"] == [2.0]
    assert "mfu" not in run["curves"]


@pytest.mark.parametrize("tail", ['{"step": 21, "tok', "\x00\x00"])
def test_half_written_line_is_left_out_with_a_note(tmp_path, capsys, tail):
    notes = compare([make(tmp_path / "a", tail=tail)], tmp_path / "x.html")["notes"]
    printed = capsys.readouterr()
    assert "0.2500" in printed.out and all("1 of 22 lines" in x for x in (printed.err, notes[0]))


def test_how_a_run_ended(tmp_path):
    folder = make(tmp_path / "a", [step(n) for n in range(1, 13)])
    with run_folder.locked(folder):
        assert RunRecord(folder).ended == "training, step 12 of 20"
    assert RunRecord(folder).ended == "stopped at step 12 of 20"


@pytest.mark.parametrize(("nan", "inf"), [(None, None), (math.nan, math.inf)])
def test_a_loss_that_is_nan_is_shown_undrawn(tmp_path, capsys, nan, inf):
    folders = [make(tmp_path / name, [step(1), step(2, loss=nan, grad_norm=inf)]) for name in "ab"]
    run, *_ = compare([*folders, make(tmp_path / "c")], tmp_path / "x.html")["runs"]
    assert "nan" in capsys.readouterr().out
    assert run["curves"]["loss"]["y"] == [5.0]
    compare([folders[0], make(tmp_path / "d", [step(1, loss=nan)])], tmp_path / "x.html")


def test_hostile_names_stay_text(tmp_path):
    script = "'</script ><script>alert(1)</script >'"
    settings = f"lr: {script}\nwandb: {{notes: {script}, tags: [{script}]}}"
    plain = make(tmp_path / "plain")
    hostile = make(tmp_path / HOSTILE, config=settings, lock={"kernel": script})
    closing = make(tmp_path / "<" / "script><script>alert(2)<" / "script>")
    shown = compare([plain, hostile, closing], tmp_path / "x.html")
    compare([plain], tmp_path / "y.html")
    text, page = ((tmp_path / name).read_text() for name in ("x.html", "y.html"))
    assert DATA.sub("", text) == DATA.sub("", page)
    (data,) = DATA.findall(text)
    assert "alert(1)" in data and not set("<>&") & set(data)
    assert shown["runs"][1]["label"] == str(hostile)
    assert "default-src 'none'" in page
    for word in ("innerHTML", "outerHTML", "document.write", "eval(", "http://", "src=", "href="):
        assert word not in page


def test_no_text_of_a_run_drives_the_terminal(tmp_path, capsys):
    rows = [step(1), {"step": 1, "tokens_seen": 100, "facts_found/\x1b[2J/64": 0.5}]
    lock = {"backend": "x", "\x9b1m": "a"}
    title = 'notes: "\\x1b]0;title\\x07"'
    folders = [
        make(tmp_path / "a\x1b[31m", rows, tail="{", config=title, lock=lock),
        make(tmp_path / "b", rows, config="notes: plain", lock=lock | {"\x9b1m": "b"}),
        tmp_path / "no\x1bfolder",
    ]
    folders[2].mkdir()
    page = f"out={tmp_path}/x.html"
    assert cli.main(["compare", *map(str, folders), page]) == 0
    assert cli.main(["compare", str(folders[2])]) == 2
    printed = "".join(capsys.readouterr())
    assert [x for x in ("[31m", "]0;title", "1m") if x not in printed] == []
    assert not [x for x in printed if not x.isprintable() and x != "\n"]


def test_each_run_is_shown_once_under_its_own_name(tmp_path, capsys):
    first, second = make(tmp_path / "x" / "a"), make(tmp_path / "y" / "a")
    empty = make(tmp_path / "b", rows=[])
    runs = compare([first, second, first / ".." / "a", empty], tmp_path / "x.html")["runs"]
    assert f"left out: {empty}" in capsys.readouterr().err
    assert [run["label"] for run in runs] == [str(first), str(second)]


def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path):
    run, empty = make(tmp_path / "runs" / "a"), make(tmp_path / "empty", rows=[])
    (tmp_path / "bare").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for path, out, part in [
        (tmp_path / "none", "x.html", "none"),
        (tmp_path / "bare", "x.html", "bare"),
        (tmp_path / "runs", "x.html", f"{tmp_path}/runs/*"),
        (empty, "x.html", "empty"),
        (run, "no/x.html", f"out={tmp_path}/no/x.html"),
    ]:
        with pytest.raises((ValueError, OSError), match=re.escape(part)) as error:
            compare([path], tmp_path / out)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="none: no such folder"):
        compare([run, tmp_path / "none"], tmp_path / "x.html")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("rows", [1, POINTS, POINTS + 1, 1234])
def test_a_reduced_curve_keeps_extremes(rows):
    values = [math.sin(n) for n in range(rows)]
    timed = [{"tokens_seen": n, "seconds": 1.0 * n, "loss": x} for n, x in enumerate(values)]
    curve = reduced(timed, "loss")
    assert len(curve["y"]) == len(curve["t"]) == len(curve["s"]) <= POINTS
    assert min(curve.get("lo", curve["y"])) == pytest.approx(min(values), rel=1e-4)
    assert max(curve.get("hi", curve["y"])) == pytest.approx(max(values), rel=1e-4)


KTO = "objective: {name: kto}\n"
BY_TOKENIZER = ("data: {tokenizer: null, vocab_size: 9}", "data: {tokenizer: runs/a}")


def test_changed_files_make_losses_incomparable(tmp_path):
    runs = [RunRecord(make(tmp_path / name)) for name in "abc"]
    for run, documents in zip(runs, ("", "d1", "d1"), strict=True):
        run.documents = documents
    assert not incomparable(runs)
    runs[2].documents = "d2"
    assert "documents" in " ".join(incomparable(runs))


@pytest.mark.parametrize(
    ("configs", "tokenizers", "is_compared"),
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
def test_losses_are_compared_over_equal_tokens(tmp_path, configs, tokenizers, is_compared):
    folders = []
    for number, config in enumerate(configs):
        rows = [step(n, loss=2.0 + number) for n in range(1, 21)]
        folders.append(make(tmp_path / f"{number}", rows, config=config))
    for folder, text in zip(folders, tokenizers, strict=False):
        (folder / "tokenizer.json").write_text(text)
    data = compare(folders, tmp_path / "x.html")
    assert ("cannot be compared" in str(data["notes"])) != is_compared
    assert tokenizers != "aa" or not differing([RunRecord(folder) for folder in folders])


def test_paths_of_one_name_do_not_differ(tmp_path):
    text = "plugins: [/{0}/a.py@sha256:{0}23456789]\ndata: {{path: /{0}/x}}\nmax_steps: 3{0}\nlr: 1"
    runs = [RunRecord(make(tmp_path / n, config=text.format(n))) for n in "01"]
    cells = [f"[a.py@{n}2345678]" for n in "01"]
    assert table_of(runs, None)[1:3] == [["max_steps", "30", "31"], ["plugins", *cells]]


# Files next to a run's rows, whoever wrote them

GRID = {"lengths": [64, 128], "depths": [0, 0.5, 1], "accuracy": [[1, 1, 1], [0.25, 0.5, 0]]}
MAPS = {"kinds": {"needle": GRID}}


def test_validations_are_shown(tmp_path):
    validation = {"step": 1, "tokens_seen": 100, "val_loss": 2.0}
    validation |= {f"val_loss_by_position/{2**b}": 5.0 - b for b in range(4)}
    run = RunRecord(make(tmp_path / "a", [step(1), validation]))
    assert run.positions == {"x": [1, 2, 4, 8], "y": [5.0, 4.0, 3.0, 2.0]}


def test_each_kind_of_evaluation_is_shown(tmp_path):
    total = {"tokens": 9, "perplexity": 3.5, "word_perplexity": 77.25, "standard_error": 0.01}
    scores = {"acc,none": 0.25, "acc_stderr,none": 0.1, "em,strict": 0.5}
    tasks = {"context": 2048, "results": {"arc": scores}}
    scores = {"niah_single_2": [1.0, 1.0], "qa_1": [0.5, 0.5]}
    ruler = {"ruler": {"lengths": [512, 2048], "scores": scores}}
    others = {"passkey": MAPS, "tasks": tasks, "ruler": ruler}
    folder = make(tmp_path / "a", val={"context": 256, "total": total}, **others)
    cells = dict(table_of([RunRecord(folder)], None))
    expected = {
        "context trained at": "64, evaluated at 256",
        "val: perplexity": "3.500 ± 0.035",
        "val: word_perplexity": "77.2500",
        "tasks: arc/em (strict)": "0.5000",
        "passkey: needle/64": "100.0%",
        "passkey: needle/128": "25.0%",
        "ruler: ruler/qa_1/2048": "50.0%",
        "ruler: ruler/mean/512": "75.0%",
    }
    assert {heading: cells[heading] for heading in expected} == expected


def test_the_curve_over_context_is_of_the_newest_checkpoint_on_its_own_documents(tmp_path):
    evaluations = {}
    names = [f"val-step-{name}" for name in ("00000012-256", "00000012-512", "00000008-512")]
    for number, name in enumerate(["README.md-step-00000012-512", *names]):
        content = {"context": int(name[-3:]), "stride": 32, "total": {"tokens": 7}}
        losses = [{"context": 64, "loss": float(number)}, {"context": 128, "loss": None}]
        evaluations[name] = content | {"by_context": losses}
    contexts = described(RunRecord(make(tmp_path / "a", **evaluations)))["contexts"]
    assert contexts == {"x": [64], "y": [2.0]}


SHORT = '{"kinds": {"a": {"lengths": [1], "depths": [0], "accuracy": []}}}'
FIFO, LINK, DANGLING = "a fifo", "a link", "a link to nothing"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("eval/x.json", text) for text in (SHORT, SHORT.replace("[]", "[[NaN]]"), "[" * 10**5)),
        *(("kernel.lock.json", text) for text in ("{", "[" * 10**5)),
        ("metrics.jsonl", json.dumps(step(21, loss=10**400))),
        ("config.yaml", "max_steps: 20\nseq_len: [64]"),
        *((file, FIFO) for file in ("eval/val.json", "metrics.jsonl", "config.yaml")),
        *((file, LINK) for file in ("config.yaml", "metrics.jsonl", "eval", "tokenizer.json")),
        *((file, DANGLING) for file in ("config.yaml", "metrics.jsonl", "tokenizer.json")),
    ],
    ids=range(17),
)
def test_what_a_file_raises_leaves_out_its_run(tmp_path, capsys, file, content):
    broken = make(tmp_path / "a", val=MAPS)
    (broken / "tokenizer.json").write_text("{}")
    if content in (FIFO, LINK, DANGLING):
        shutil.move(broken / file, tmp_path / "secret")
        target = tmp_path / ("none" if content == DANGLING else "secret")
        os.mkfifo(broken / file) if content == FIFO else (broken / file).symlink_to(target)
    else:
        (broken / file).write_text(content)
    compare([broken, make(tmp_path / "b")], tmp_path / "x.html")
    error = capsys.readouterr().err
    assert error.startswith(f"note: left out: {broken}") and error.count("\n") == 1
    with pytest.raises((ValueError, OSError), match=str(broken)):
        compare([broken], tmp_path / "x.html")


def test_a_damaged_checkpoint_leaves_the_documents_unknown(tmp_path):
    file = make(tmp_path / "a") / "checkpoints" / "step-00000001.ckpt" / "checkpoint.json"
    file.parent.mkdir(parents=True)
    file.write_text("[]")
    assert RunRecord(tmp_path / "a").documents == ""


def test_locks_that_differ_are_in_the_table(tmp_path):
    lock = {"backend": "flash", "machine": {"torch": "2.13.0"}, "fingerprint": {"out": "b"}}
    windowed = lock | {"kernel": "cudnn", "fingerprint": {"out": "d"}}
    newer = lock | {"machine": {"torch": "2.14.0"}, "windows": windowed}
    folders = [
        make(tmp_path / "a", lock=lock),
        make(tmp_path / "b", lock=newer),
        make(tmp_path / "c", config="seq_len: 128", lock=lock | {"fingerprint": {"out": "c"}}),
        make(tmp_path / "d"),
    ]
    # Layers with a window may have kernels of their own
    windows = folders[1] / "config.yaml"
    windows.write_text(windows.read_text().replace("{", "{window: sdpa, "))
    lines = {name: cells for name, *cells in table_of([*map(RunRecord, folders)], None)}
    assert lines["attention"] == ["flash", "sdpa+flash", "flash", "flash"]
    assert lines["lock.torch"] == ["2.13.0", "2.14.0", "2.13.0", "–"]
    assert lines["lock.windows.kernel"] == ["–", "cudnn", "–", "–"]
    assert lines["lock.fingerprint"][0] == lines["lock.fingerprint"][1]
    assert lines["lock.fingerprint"][0] != lines["lock.fingerprint"][2]


# Costs

LOCK = {"backend": "flash", "kernel": "hopper", "machine": {"device": "NVIDIA H200"}}


def test_gpu_hours_and_money_are_products():
    figures = {"memory_peak_gib": 2.0, "device_seconds": 14400.0, "tokens_seen": 5_000_000}
    config = {"devices": 8, "lock.device": "NVIDIA H200"}
    known = {"device": "NVIDIA H200", "devices": 8, "gpu_hours": 4.0}
    cost = cost_of(config, figures, 2.5)
    assert cost == known | {"money": 10.0, "tokens_per_money": 500_000}
    assert cost_of(config, figures, None) == known
    on_cpu = {"process_peak_gib": 2.0, "device_seconds": 1800.0, "tokens_seen": 5}
    assert cost_of({"lock.device": "cpu"}, on_cpu, 2.5) == {"device": "CPU", "devices": 1}
    assert "gpu_hours" not in cost_of({}, {"memory_peak_gib": 1.0, "device_seconds": None}, 2.5)


def test_the_table_and_the_file_have_costs_and_numbers(tmp_path):
    rows = [step(n, device_seconds=4800.0 * n) for n in (1, 2, 3)]
    folders = [
        make(tmp_path / '<script>, "a"', rows, config="devices: 4", lock=LOCK),
        make(tmp_path / "b", [*rows[:2], step(3, loss=math.nan, device_seconds=3600.0)], lock=LOCK),
    ]
    table = table_of([RunRecord(folder, 2.5) for folder in folders], 2.5)
    lines = {name: cells for name, *cells in table}
    assert lines["cost at 2.5 an hour"] == ["10.00", "2.50"]
    assert lines["kernel"] == ["hopper", "hopper"]
    words = [*map(str, folders), f"out={tmp_path}/x.html", f"table={tmp_path}/runs.csv"]
    assert cli.main(["compare", *words, "price=2.5"]) == 0
    with (tmp_path / "runs.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [float(row["money"]) for row in written] == [10.0, 2.5]
    # The rate of the configuration and of the last step
    assert (written[1]["config.lr"], float(written[1]["lr"])) == ("0.001", 0.001)
    assert [row["run"] for row in written] == [str(folder) for folder in folders]
    assert written[1]["loss"] == "nan" and written[0]["tokens_seen"] == "300"


@pytest.mark.parametrize(
    ("word", "code", "message"),
    [("price=2", 0, "no run had one"), ("table=no/runs.csv", 2, "error: table=no/runs.csv: ")],
)
def test_a_word_that_does_not_fit_is_one_line(tmp_path, capsys, word, code, message):
    folder = make(tmp_path / "a", [{"step": 1, "tokens_seen": 100, "loss": 5.0}])
    assert cli.main(["compare", str(folder), f"out={tmp_path}/x.html", word]) == code
    assert message in capsys.readouterr().err
