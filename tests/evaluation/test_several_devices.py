"""Every kind of evaluation is the same however its rows and weights are spread over ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("several_devices.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases", "seed"), [(2, 20, 0), (4, 20, 1000)])
def test_losses_facts_and_tasks_are_those_of_one_device(
    ranks: int, cases: int, seed: int, tmp_path: Path
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    process = subprocess.run(
        [*launcher, *port, str(SCRIPT), str(cases), str(seed), str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    results = json.loads((tmp_path / "differences.json").read_text())
    assert len(results) == cases
    for result in results:
        for name, difference in result["differences"].items():
            assert difference < 1e-6, (name, result)
