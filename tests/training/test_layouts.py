"""Loss and gradients of a step are the same however its rows and weights are spread over ranks;
every fourth case multiplies in FP8.
"""

import json
from pathlib import Path

import pytest

from tests.processes import run_on

SCRIPT = Path(__file__).with_name("layouts.py")


def differences(ranks: int, cases: int, seed: int, out: Path) -> list[dict[str, float]]:
    """What `layouts.py` found in so many random cases on `ranks` processes."""
    run_on(ranks, SCRIPT, cases, seed, out)
    results: list[dict[str, float]] = json.loads(out.read_text())
    assert len(results) == cases
    return results


@pytest.mark.parametrize(
    ("ranks", "cases", "seed"),
    [
        (2, 8, 0),
        pytest.param(1, 115, 1000, marks=pytest.mark.slow),
        pytest.param(2, 150, 2000, marks=pytest.mark.slow),
        pytest.param(4, 30, 3000, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(
    ranks: int, cases: int, seed: int, tmp_path: Path
) -> None:
    for result in differences(ranks, cases, seed, tmp_path / "out.json"):
        for name in ("loss", "grad_norm", "gradients", "validation"):
            assert result[name] < result["limit"], (name, result)
