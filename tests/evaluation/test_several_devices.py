"""Every kind of evaluation is the same however its rows and weights are spread over ranks."""

import json
from pathlib import Path

import pytest

from tests.processes import run_on

SCRIPT = Path(__file__).with_name("several_devices.py")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases", "seed"), [(2, 8, 0), (4, 6, 1000)])
def test_several_devices_score_as_one(ranks: int, cases: int, seed: int, tmp_path: Path) -> None:
    run_on(ranks, SCRIPT, cases, seed, tmp_path)
    results = json.loads((tmp_path / "differences.json").read_text())
    assert len(results) == cases
    for result in results:
        for name, difference in result["differences"].items():
            assert difference < 1e-6, (name, result)
