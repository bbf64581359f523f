"""train.py as a command: --help, a mistake, its traceback, and what it leaves behind (nothing)."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.processes import ROOT, finished

SLOW_TO_IMPORT = {"torch", "triton", "lightning", "datasets", "transformers", "pyarrow", "wandb"}


def train(*overrides: str, cwd: Path) -> CompletedProcess[str]:
    """Run train.py in `cwd`, which stays empty."""
    process = finished(ROOT / "train.py", overrides, cwd)
    assert not list(cwd.iterdir())
    return process


def test_help_imports_no_large_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    process = train("--help", cwd=tmp_path)
    assert process.returncode == 0
    assert "seq_len=4096" in process.stdout
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "longctx" in imported
    assert not imported & SLOW_TO_IMPORT


def test_a_mistake_is_one_line_or_a_traceback_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = train("attention=flsh", cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: attention=flsh")
    assert process.stderr.count("\n") == 1
    monkeypatch.setenv("LONGCTX_TRACEBACK", "1")
    process = train("seq_len=abc", cwd=tmp_path)
    assert "Traceback" in process.stderr
    assert process.stderr.splitlines()[-1].startswith("error: seq_len=abc")
