"""train.py as a command: how it answers mistakes and --help, from any directory, and what it leaves
behind (nothing).
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "train.py"
SLOW_TO_IMPORT = {"torch", "triton", "lightning", "datasets", "transformers", "pyarrow", "wandb"}


def train(*overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *overrides]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_help_is_quick_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    process = train("--help", cwd=tmp_path)
    assert process.returncode == 0
    assert "seq_len=4096" in process.stdout
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "longctx" in imported
    assert not imported & SLOW_TO_IMPORT
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention=flsh"], "did you mean flash?"),
        (["-m", "seq_len=64,abc"], "seq_len=abc"),
        (["-m", "name=x", "seq_len=64,128"], "name=x: each job"),
        (["resume=runs/nothing"], "resume=runs/nothing: no such folder"),
        (["resume=."], "it has no config.yaml"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    process = train(*overrides, cwd=tmp_path)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error: ")
    assert process.stderr.count("\n") == 1
    assert message in process.stderr
    assert not list(tmp_path.iterdir())


def test_the_traceback_shows_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_TRACEBACK", "1")
    process = train("seq_len=abc", cwd=tmp_path)
    assert "Traceback" in process.stderr
    assert process.stderr.splitlines()[-1].startswith("error: seq_len=abc")
