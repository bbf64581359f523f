"""Lightning is imported without the packages that only its metrics use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import PYTHONPATH


def test_what_only_its_metrics_use_is_not_imported(tmp_path: Path) -> None:
    for package in ("matplotlib", "scipy", "torchvision", "transformers"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit(f'{__name__} imported')")
        information = tmp_path / f"{package}-99.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Name: {package}\nVersion: 99.0\n")
    done = subprocess.run(
        [sys.executable, "-c", "import longctx.distributed.lightning_parts as parts; parts.Fabric"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), PYTHONPATH])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-500:]
