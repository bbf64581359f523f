"""The attention benchmark: rates follow from times, nobody is left out in silence, and the time
that it may take is kept.
"""

import dataclasses
import json

import pytest
import torch

from benchmarks import attention as bench
from benchmarks import timing
from benchmarks.attention import (
    MASKS,
    PEERS,
    Clock,
    Options,
    against,
    fill,
    left_out,
    measure,
)
from benchmarks.words import main
from longctx.attention import attention

SMALL = dataclasses.replace(
    Options(),
    channels=64,
    row_tokens=256,
    window=16,
    backends=("flash", "flash-portable", "sdpa-flash", "flex"),
)


@pytest.mark.no_gpu
@pytest.mark.parametrize("mask", MASKS)
def test_a_case_has_a_row_for_every_backend(mask):
    rows = measure(SMALL, mask, 32, 128, Clock(60), 0.05, "cpu", 100.0)
    assert [row["backend"] for row in rows] == list(SMALL.backends)
    flash, portable, sdpa, flex = rows
    assert (flash["batch"], flash["heads"], flash["kernel"]) == (2, 2, "torch-tiled")
    assert flash["both_ms"] == pytest.approx(flash["forward_ms"] + flash["backward_ms"], abs=1e-3)
    assert portable["skipped"] == "what flash runs anyway"
    assert sdpa["forward_ratio"] == sdpa["both_ratio"] == 1.0
    assert "FlexAttention has no backward" in flex["skipped"]


def test_rates_shares_and_ratios_follow_from_times():
    times = {
        ("flash", "forward"): 2.0,
        ("flash", "backward"): 6.0,
        ("flex", "forward"): 3.0,
        ("flex", "backward"): 7.0,
    }
    row = {"backend": "flash"}
    fill(row, times, "flex", flops=1e12, ceiling=1000.0)
    assert (row["forward_tflops"], row["backward_tflops"], row["both_tflops"]) == (
        500.0,
        416.7,
        437.5,
    )
    assert (row["forward_share"], row["both_share"]) == (0.5, 0.438)
    assert (row["forward_ratio"], row["backward_ratio"], row["both_ratio"]) == (1.5, 1.167, 1.25)
    alone = {"backend": "flash"}
    fill(alone, times, "sdpa-flash", flops=1e12, ceiling=1000.0)
    assert "forward_ratio" not in alone
    case = {"mask": "full", "head_size": 64, "tokens": 8}
    peer = case | {"backend": "flex", "forward_ms": 3.0, "backward_ms": 7.0, "both_ms": 10.0}
    compared = against(
        [case | row, peer, case | {"backend": "sdpa-flash", "skipped": "x"}], "flash"
    )
    assert compared == [case | {"flex": "1.50 / 1.17 / 1.25"}]


def test_a_backend_that_fails_costs_only_itself(monkeypatch):
    """Peers raise whatever they like for what they cannot do."""

    def breaks(*args, backend, **options):
        if backend == "sdpa":
            raise NotImplementedError("window backward is\nnot there yet")
        return attention(*args, backend=backend, **options)

    monkeypatch.setattr("longctx.attention.attention", breaks)
    rows = {
        row["backend"]: row
        for row in measure(SMALL, "causal", 32, 64, Clock(60), 0.05, "cpu", 100.0)
    }
    assert (
        rows["sdpa-flash"]["skipped"]
        == "failed with NotImplementedError: window backward is not there yet"
    )
    assert rows["flash"]["forward_ms"] > 0


def test_rows_after_the_time_limit_say_so():
    over = measure(SMALL, "causal", 32, 64, Clock(-1), 0.05, "cpu", 100.0)
    assert all("were over" in row["skipped"] for row in over)
    slow = Clock(170, preparing={"sdpa-flash": 43.0, "flash": 43.0})
    rows = measure(SMALL, "causal", 32, 64, slow, 0.05, "cpu", 100.0)
    assert rows[2]["skipped"].startswith("compiling it took 43 of 170 s")
    assert "forward_ms" in rows[0], "flash is what this is about"
    reasons = left_out([*over, *rows])
    assert reasons[over[0]["skipped"]][0] == "flash in 1 of 2 cases"


def test_rounds_are_shuffled_and_fit_the_time():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    medians = timing.medians(calls, 5)
    assert set(medians) == set("abc")
    sequence = "".join(order)
    assert sequence[:9] == "aabbcc" + "abc"
    rounds = [sequence[i : i + 3] for i in range(9, len(sequence), 3)]
    assert len(rounds) == 5
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 2, "none always follows the same other"
    order.clear()
    timing.medians(calls, 1000, seconds=0.0, least=2)
    assert len(order) == 6 + 3 + 6


def test_benchmark_writes_tables_json_and_plot(tmp_path, monkeypatch, capsys):
    """All but the GPU: tables, ratios, reasons, JSON, plot."""
    if not torch.cuda.is_available():
        original = bench.measure
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
        monkeypatch.setattr(bench, "matmul_tflops", lambda: 1.0)

        def on_cpu(*args):
            with monkeypatch.context() as inside:
                inside.setattr(torch.cuda, "is_available", lambda: False)
                return original(*args[:6], "cpu", args[7])

        monkeypatch.setattr(bench, "measure", on_cpu)
    out = tmp_path / "r"
    overrides = [
        "lengths=64,100",
        "head_sizes=32",
        "channels=64",
        "row_tokens=128",
        "repeats=3",
        "seconds=30",
        f"out={out}",
    ]
    assert main(["attention", "masks=causal,window", *overrides]) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    assert len(report["rows"]) == 4 * len(PEERS)
    assert report["command"].startswith(
        "python -m benchmarks attention masks=causal,window lengths=64,100"
    )
    output = capsys.readouterr().out
    assert "how many times as fast as its peers" in output
    assert "left out" in output
    assert out.with_suffix(".png").exists()


@pytest.mark.gpu
def test_rates_follow_from_times(tmp_path):
    out = tmp_path / "r"
    overrides = [
        "lengths=1000",
        "head_sizes=64",
        "masks=causal,window,documents",
        "repeats=3",
        f"out={out}",
    ]
    assert main(["attention", *overrides]) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    flash = {row["mask"]: row for row in report["rows"] if row["backend"] == "flash"}
    flops = 4 * 16 * (1000 * 1001 // 2) * 32 * 64
    row = flash["causal"]
    assert row["forward_tflops"] == pytest.approx(flops / row["forward_ms"] / 1e9, rel=0.01)
    peer = next(r for r in report["rows"] if r["backend"] == "sdpa-flash" and r["mask"] == "causal")
    assert row["both_ratio"] == pytest.approx(
        (peer["forward_ms"] + peer["backward_ms"]) / (row["forward_ms"] + row["backward_ms"]),
        rel=0.02,
    )
    assert 0 < row["both_share"] < 1
    assert report["gpu"]


@pytest.mark.gpu
def test_times_are_the_devices_own():
    """A call that keeps Python busy for 20 ms takes the device far less."""
    import time

    x = torch.randn(2048, 2048, device="cuda")
    medians = timing.medians({"dawdling": lambda: (time.sleep(0.02), x @ x)}, 20)
    assert medians["dawdling"] < 10
