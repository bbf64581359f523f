"""The step benchmark on a CPU: its parts sum to the step, nothing large is nameless, and turning
lengths and gains follow.
"""

import json

import matplotlib.image
import pytest

from benchmarks.step import gains, of, turning_length
from benchmarks.trace import ATTENTION, IDLE, MATRICES, OTHER, PARTS
from benchmarks.words import main


def row(tokens, attention, matrices, backend="flash", failed=None):
    ms = {ATTENTION: attention, MATRICES: matrices}
    total = attention + matrices
    return {
        "tokens": tokens,
        "backend": backend,
        "failed": failed,
        "ms": ms,
        "shares": {part: x / total for part, x in ms.items()},
        "tokens_per_step": 1000,
        "tokens_per_second": 1000 * 1000 / total,
    }


def test_turning_length_is_where_the_lines_cross():
    assert turning_length([row(1000, 1.0, 4.0), row(2000, 3.0, 4.0), row(4000, 7.0, 4.0)]) == {
        "tokens": 2500,
        "measured": True,
    }
    assert turning_length([row(1000, 1.0, 4.0), row(2000, 2.0, 4.0)]) == {
        "tokens": 4000,
        "measured": False,
    }
    assert turning_length([row(1000, 5.0, 4.0), row(2000, 9.0, 4.0)]) == {
        "tokens": 1000,
        "measured": False,
    }
    assert turning_length([row(1000, 1.0, 4.0), row(2000, 1.0, 4.0)]) is None
    assert turning_length([]) is None


def test_gains_are_ratios_of_whole_steps():
    rows = [
        row(512, 2.0, 8.0),
        row(512, 12.0, 8.0, "naive"),
        row(512, 1, 1, "sdpa", failed="out of memory"),
    ]
    assert gains(rows) == [
        {"tokens": 512, "over naive": 2.0, "over sdpa": "out of memory", "left in attention": 1.25}
    ]
    assert of(rows, "sdpa") == []


@pytest.mark.slow
def test_a_profiled_step_sums_to_the_step(tmp_path, capsys):
    overrides = [
        "model=tiny",
        "model.layers=2",
        "model.vocab_size=512",
        "accumulate=1",
        "batch_size=4",
        "workers=0",
        "device=cpu",
    ]
    assert (
        main(
            [
                "step",
                "lengths=128,257",
                "backends=naive,flash",
                "steps=1",
                f"out={tmp_path}/s",
                *overrides,
            ]
        )
        == 0
    )
    report = json.loads((tmp_path / "s.json").read_text())
    assert [(r["tokens"], r["backend"]) for r in report["rows"]] == [
        (n, b) for n in (128, 257) for b in ("naive", "flash")
    ]
    for point in report["rows"]:
        shares = point["shares"]
        assert sum(shares.values()) == pytest.approx(1)
        assert shares[OTHER] < 0.3  # a step of some 10 ms, on a machine that may be busy
        assert set(shares) == set(PARTS)
        assert all(shares[part] > 0 for part in PARTS if part not in (OTHER, "copies", IDLE))
    per_layer = 128 * (4 + 2 * 2) * 32 + 128 * 128 + 3 * 128 * 384  # weights of a layer's products
    assert report["turns_by_flops"] == pytest.approx((2 * per_layer + 512 * 128) / (2 * 128))
    assert matplotlib.image.imread(tmp_path / "s.png").std() > 0.01
    assert "over naive" in capsys.readouterr().out.replace("_", " ")
