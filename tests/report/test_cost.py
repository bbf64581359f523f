"""What runs cost is the product of devices, time and price, in the tables and in the files."""

import csv
import json
import math
from pathlib import Path

import pytest

from longctx import cli
from longctx.report.compare import differing, table_of
from longctx.report.run_view import RunRecord, cost_of, hardware, watch
from tests.report.run_files import make, step

HOSTILE = '<script>alert(1)</script>, "a"'
LOCK = {
    "backend": "flash",
    "kernel": "hopper",
    "machine": {"device": "NVIDIA H200"},
    "fingerprint": {"out": "b" * 64},
}


def on_gpus(folder: Path, devices: int, seconds: float, lock: bool = True) -> Path:
    """A run of 3 steps on so many GPUs."""
    rows = [step(n, seconds=seconds * n / 3) for n in (1, 2, 3)]
    make(folder, rows, config=f"devices: {devices}")
    if lock:
        (folder / "kernel.lock.json").write_text(json.dumps(LOCK))
    return folder


def test_gpu_hours_and_money_are_products():
    figures = {"memory_peak_gib": 2.0, "seconds": 1800.0, "tokens_seen": 5_000_000}
    cost = cost_of({"devices": 8}, figures, {"device": "NVIDIA H200"}, 2.5)
    assert (hardware(cost), cost["gpu_hours"], cost["money"]) == ("8 × NVIDIA H200", 4.0, 10.0)
    assert cost["tokens_per_money"] == 500_000
    assert cost_of({"devices": 8}, figures, {}, None).keys() == cost.keys() - {
        *("money", "tokens_per_money")
    }
    resumed = figures | {"device_seconds": 3600.0}
    assert cost_of({"devices": 8}, resumed, {}, None)["gpu_hours"] == 1.0
    on_cpu = {"process_peak_gib": 2.0, "seconds": 1800.0, "tokens_seen": 5}
    expected = {"device": "CPU", "devices": 1, "seconds": 1800.0}
    assert cost_of({}, on_cpu, {"device": "cpu"}, 2.5) == expected
    assert "gpu_hours" not in cost_of({}, {"memory_peak_gib": 1.0, "seconds": None}, {}, 2.5)


def test_the_most_tokens_for_money_are_marked(tmp_path):
    folders = [on_gpus(tmp_path / name, n, 3600) for name, n in (("a", 4), ("b", 1))]
    table = table_of([RunRecord(folder, 9, 2.5) for folder in folders], 2.5)
    rows = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    assert [row["cost at 2.5 an hour"] for row in rows] == ["10.00", "2.50"]
    assert [row["kernel"] for row in rows] == ["hopper", "hopper"]
    assert (1, table.headings.index("tokens for 1 of its currency")) in table.best
    without_price = table_of([RunRecord(folder, 9) for folder in folders], None)
    assert "GPU hours" in without_price.headings
    assert len(without_price.headings) == len(table.headings) - 2


def test_a_file_has_the_numbers_of_each_run(tmp_path):
    nan = [step(1, loss=math.nan)]
    folders = [on_gpus(tmp_path / HOSTILE.replace("/", ""), 2, 3600), make(tmp_path / "b", nan)]
    out = tmp_path / "runs.csv"
    words = [*map(str, folders), f"out={tmp_path}/x.html", f"table={out}", "price=1.5"]
    assert cli.main(["compare", *words]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["money"] or 0) for row in rows] == pytest.approx([3.0, 1.5 * 0.1 / 3600])
    assert [int(row["tokens_seen"]) for row in rows] == [300, 100]
    assert float(rows[0]["memory_peak_gib"]) == 2.5
    assert rows[0]["kernel"] == "hopper"
    # The rate of the configuration and of the last step
    assert (rows[1]["config.lr"], float(rows[1]["lr"])) == ("0.001", 0.001)
    assert rows[0]["run"] == folders[0].name
    assert rows[1]["loss"] == "nan"


@pytest.mark.parametrize(
    ("word", "code", "message"),
    [
        ("price=2", 0, "no run had one"),
        ("table=runs.xlsx", 2, "error: table=runs.xlsx: "),
        ("table=no/such/runs.csv", 2, "error: table=no/such/runs.csv: "),
    ],
)
def test_a_word_that_does_not_fit_is_one_line(tmp_path, capsys, word, code, message):
    row = step(1)
    del row["memory_peak_gib"]
    folder = make(tmp_path / "a", [row])
    assert cli.main(["compare", str(folder), f"out={tmp_path}/x.html", word]) == code
    assert message in capsys.readouterr().err


def test_paths_of_one_name_do_not_differ(tmp_path):
    texts = [
        f"data: {{path: /{n}/docs, cache: /{n}/c}}\nmax_steps: 3{n}\nlr: 1\nseq_len: 512"
        for n in range(2)
    ]
    runs = [RunRecord(make(tmp_path / f"{n}", config=text), 9) for n, text in enumerate(texts)]
    assert differing(runs) == ["max_steps"]


def test_a_run_that_is_watched_shows_its_cost(tmp_path, capsys):
    watch(on_gpus(tmp_path / "a", 2, 7200), price=2.0)
    printed = capsys.readouterr().out
    for part in ("2 × NVIDIA H200", "kernel hopper", "GPU hours 4.00", "cost 8.00 at 2.0 an hour"):
        assert part in printed
