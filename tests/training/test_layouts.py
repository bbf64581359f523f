"""Loss and gradients of a step are the same however its rows and weights are spread over ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("layouts.py")
ROOT = SCRIPT.parents[2]


def differences(ranks: int, cases: int, seed: int, out: Path) -> list[dict[str, float]]:
    """What `layouts.py` found in so many random cases on `ranks` processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    process = subprocess.run(
        [*launcher, *port, str(SCRIPT), str(cases), str(seed), str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    results: list[dict[str, float]] = json.loads(out.read_text())
    assert len(results) == cases
    return results


@pytest.mark.parametrize(
    ("ranks", "cases", "seed"),
    [
        (2, 8, 0),
        pytest.param(1, 60, 1000, marks=pytest.mark.slow),
        pytest.param(2, 190, 2000, marks=pytest.mark.slow),
        pytest.param(4, 50, 3000, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(
    ranks: int, cases: int, seed: int, tmp_path: Path
) -> None:
    for result in differences(ranks, cases, seed, tmp_path / "out.json"):
        for name in ("loss", "grad_norm", "gradients", "validation"):
            assert result[name] < 1e-5, (name, result)
