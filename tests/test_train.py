"""train.py as a command: how it answers mistakes and --help, from any directory, and what it leaves
behind (nothing).
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "train.py"


def train(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_help_is_quick_and_leaves_nothing(tmp_path: Path) -> None:
    fastest = 10.0
    for _ in range(3):
        start = time.perf_counter()
        done = train("--help", cwd=tmp_path)
        fastest = min(fastest, time.perf_counter() - start)
    assert done.returncode == 0
    assert "seq_len=4096" in done.stdout
    assert fastest < 1.5
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["attention=flsh"], "did you mean flash?"),
        (["seq_len=abc"], "seq_len=abc"),
        (["seq_length=5"], "did you mean seq_len?"),
        (["-m", "seq_len=64,abc"], "seq_len=abc"),
        (["-m", "name=x", "seq_len=64,128"], "name=x: each job"),
        (["resume=runs/nothing"], "resume=runs/nothing: no such folder"),
        (["resume=."], "it has no config.yaml"),
        (["data=text", "data.path=missing"], "missing"),
        (["device=cpu", "runs=/proc/here"], "runs=/proc/here"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, words: list[str], said: str
) -> None:
    done = train(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_traceback_shows_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_TRACEBACK", "1")
    done = train("seq_len=abc", cwd=tmp_path)
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: seq_len=abc")
