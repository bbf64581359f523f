"""A card's file: every backend that runs here has a row of attention and of steps."""

import json

import pytest

from benchmarks.words import main

TINY = ["model=tiny", "model.layers=1", "model.vocab_size=300", "compile=false", "workers=0"]


@pytest.mark.slow
@pytest.mark.no_gpu
def test_a_small_card_is_measured(tmp_path):
    own = ["lengths=32,64", "tokens=64", "head_sizes=16", "channels=32", "minutes=1"]
    assert main(["card", *own, f"out={tmp_path}", *TINY]) == 0
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert len({row["mask"] for row in result["attention"]}) == 3
    ran = [row for row in result["attention"] if "skipped" not in row]
    assert {row["backend"] for row in ran} == {"flash", "sdpa-flash"}
    assert all(row["forward_spread"] >= 0 for row in ran)
    points = [(row["tokens"], row["backend"]) for row in result["steps"]]
    assert points == [(n, name) for n in (32, 64) for name in ("flash", "sdpa", "naive")]
    for row in result["steps"]:
        tokens_per_second = 64e3 / row["ms"]
        assert row["failed"] is None
        assert row["tokens_per_second"] == pytest.approx(tokens_per_second)
