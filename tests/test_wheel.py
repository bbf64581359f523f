"""A wheel trains by itself: it holds the presets, and needs no checkout beside it."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_no_command_installs_longctx_from_pypi() -> None:
    """On PyPI the name belongs to another project."""
    files = [path for folder in (".", "docs", "longctx") for path in (ROOT / folder).glob("*.md")]
    files += (ROOT / "longctx").rglob("*.py")
    installs = re.compile(r"pip install [^`\n]*longctx")
    assert len(files) > 100
    assert [path for path in files if installs.search(path.read_text())] == []


@pytest.mark.slow
def test_wheel_trains_without_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building leaves files there
    for name in ("longctx", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "wheels"]
    subprocess.run([*build, str(source)], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")

    (tmp_path / "text.txt").write_text("a rose is a rose is a rose\n" * 4000)
    data = ["data=text", "data.path=text.txt", "data.vocab_size=300", "data.val_fraction=0"]
    overrides = ["model=tiny", "seq_len=64", "max_steps=1", "device=cpu", "wandb.mode=disabled"]
    environment = os.environ | {"PYTHONPATH": "site", "LONGCTX_CACHE": str(tmp_path / "cache")}
    process = subprocess.run(
        [sys.executable, "-P", "-m", "longctx", "train", *data, *overrides],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()]
