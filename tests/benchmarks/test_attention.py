"""The attention benchmark: rates follow from times; a backend has a row or a reason."""

import dataclasses

import pytest
import torch

from benchmarks import attention as bench
from benchmarks import timing
from benchmarks.attention import MASKS, PEERS, Clock, Options, against, fill, left_out, measure
from longctx.attention import attention

SMALL = dataclasses.replace(
    Options(),
    channels=64,
    row_tokens=256,
    window=16,
    backends=("flash", "flash-portable", "sdpa-flash", "flex"),
)


def measured(mask: str = "causal", tokens: int = 64, clock: Clock | None = None):
    return measure(SMALL, mask, 32, tokens, clock or Clock(60), 0.05, "cpu", 100.0)


@pytest.mark.no_gpu
@pytest.mark.parametrize("mask", MASKS)
def test_a_case_has_a_row_for_every_backend(mask):
    rows = measured(mask, 128)
    assert [row["backend"] for row in rows] == list(SMALL.backends)
    flash, portable, sdpa, flex = rows
    assert (flash["batch"], flash["heads"], flash["kernel"]) == (2, 2, "torch-tiled")
    assert flash["both_ms"] == pytest.approx(flash["forward_ms"] + flash["backward_ms"], abs=1e-3)
    assert sdpa["forward_ratio"] == sdpa["both_ratio"] == 1.0
    assert portable["skipped"] and flex["skipped"]


def test_rates_and_ratios_follow_from_times():
    flash = {("flash", "forward"): 2.0, ("flash", "backward"): 6.0}
    times = flash | {("flex", "forward"): 3.0, ("flex", "backward"): 7.0}
    row, alone = {"backend": "flash"}, {"backend": "flash"}
    fill(row, times, "flex", flops=1e12, ceiling=1000.0)
    rates = [row[f"{name}_tflops"] for name in ("forward", "backward", "both")]
    assert rates == [500.0, 416.7, 437.5]
    assert (row["forward_share"], row["both_share"]) == (0.5, 0.438)
    assert (row["forward_ratio"], row["backward_ratio"], row["both_ratio"]) == (1.5, 1.167, 1.25)
    fill(alone, times, "sdpa-flash", flops=1e12, ceiling=1000.0)
    assert "forward_ratio" not in alone
    case = {"mask": "full", "head_size": 64, "tokens": 8}
    peer = case | {"backend": "flex", "forward_ms": 3.0, "backward_ms": 7.0, "both_ms": 10.0}
    rows = [case | row, peer, case | {"backend": "sdpa-flash", "skipped": "x"}]
    assert against(rows, "flash") == [case | {"flex": "1.50 / 1.17 / 1.25"}]


def test_a_failing_backend_costs_only_itself(monkeypatch):
    def breaks(*args, backend, **options):
        if backend == "sdpa":
            raise NotImplementedError("window backward is\nnot there yet")
        return attention(*args, backend=backend, **options)

    monkeypatch.setattr("longctx.attention.attention", breaks)
    rows = {row["backend"]: row for row in measured()}
    reason = "failed with NotImplementedError: window backward is not there yet"
    assert rows["sdpa-flash"]["skipped"] == reason
    assert rows["flash"]["forward_ms"] > 0


def test_the_time_limit_leaves_rows_with_reasons():
    over = measured(clock=Clock(-1))
    assert all(row["skipped"] for row in over)
    rows = measured(clock=Clock(170, preparing={"sdpa-flash": 43.0, "flash": 43.0}))
    assert "43 of 170 s" in rows[2]["skipped"]
    assert "forward_ms" in rows[0]  # flash is never left out
    assert left_out([*over, *rows])[over[0]["skipped"]][0] == "flash in 1 of 2 cases"


def test_a_benchmark_writes_tables_json_and_plot(result_of, tmp_path, monkeypatch, capsys):
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
    overrides = ["lengths=64,100", "head_sizes=32", "channels=64", "row_tokens=128", "repeats=3"]
    report = result_of("attention", "masks=causal,window", *overrides, "seconds=30")
    assert len(report["rows"]) == 4 * len(PEERS)
    assert report["command"].startswith("python -m benchmarks attention masks=causal,window")
    assert capsys.readouterr().out
    assert (tmp_path / "result.png").exists()


@pytest.mark.gpu
def test_times_are_the_devices_own():
    """A call that keeps Python busy for 20 ms takes the device far less."""
    import time

    x = torch.randn(2048, 2048, device="cuda")
    medians = timing.medians({"dawdling": lambda: (time.sleep(0.02), x @ x)}, 20)
    assert medians["dawdling"] < 10
