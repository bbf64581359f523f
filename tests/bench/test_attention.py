"""The attention benchmark: ratios and rates follow from its own times, and its plot draws every backend."""

import json

import matplotlib.image
import pytest

from longctx.bench.attention import plot
from longctx.bench.words import main


def test_plot_draws_what_was_found(tmp_path):
    rows = [
        {
            "mask": "causal",
            "head_size": 64,
            "tokens": n,
            "backend": b,
            "forward_tflops": n / 10,
            "backward_tflops": n / 20,
        }
        for n in (512, 1024)
        for b in ("flash", "sdpa-flash")
    ]
    rows.append({"mask": "causal", "head_size": 64, "tokens": 512, "backend": "flex", "skipped": "no GPU"})
    found = {"rows": rows, "matmul_tflops": 100.0, "gpu": "test", "torch": "2", "triton": "3"}
    plot(found, tmp_path / "deep" / "a.png")
    assert matplotlib.image.imread(tmp_path / "deep" / "a.png").std() > 0.01
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.png"]


@pytest.mark.gpu
def test_rates_follow_from_times(tmp_path):
    out = tmp_path / "r"
    assert main(["attention", "lengths=1000", "head_sizes=64", "masks=causal,window", "repeats=3", f"out={out}"]) == 0
    found = json.loads(out.with_suffix(".json").read_text())
    flash = {row["mask"]: row for row in found["rows"] if row["backend"] == "flash"}
    flops = 4 * 16 * (1000 * 1001 // 2) * 32 * 64
    row = flash["causal"]
    assert row["forward_tflops"] == pytest.approx(flops / row["forward_ms"] / 1e9, rel=0.01)
    peer = next(r for r in found["rows"] if r["backend"] == "sdpa-flash" and r["mask"] == "causal")
    assert row["both_ratio"] == pytest.approx(
        (peer["forward_ms"] + peer["backward_ms"]) / (row["forward_ms"] + row["backward_ms"]), rel=0.02
    )
    assert flash["window"]["forward_ms"] < row["forward_ms"] * 1.5
    assert found["gpu"]
    assert found["command"].startswith("python -m longctx.bench attention lengths=1000")
