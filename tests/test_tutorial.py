"""The commands of docs/tutorial.md, run in their order as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = [
    line
    for block in re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.M | re.S
    )
    for line in block.splitlines()
]


@pytest.mark.slow  # about a minute: two small runs, an evaluation, and the start of six processes
def test_every_command_of_the_tutorial_does_what_it_is_there_for(tmp_path: Path) -> None:
    for name in ("train.py", "eval.py", "longctx", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "LONGCTX_CACHE": str(tmp_path / "cache")}
    written = []
    for command in COMMANDS:
        words = shlex.split(command)
        start = {"python": [sys.executable], "longctx": [sys.executable, "-m", "longctx"]}
        process = subprocess.run(
            start[words[0]] + words[1:], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
        assert "warning" not in process.stderr, f"{command}\n{process.stderr}"
        written.append(process.stdout)

    for run in ("short", "long"):
        assert (tmp_path / "runs" / run / "checkpoints" / "last.ckpt").exists()
    assert list((tmp_path / "runs" / "long" / "eval").glob("*.json"))
    assert (tmp_path / "compare.html").is_file()
    (text,) = (x for x, command in zip(written, COMMANDS, strict=True) if "generate" in command)
    assert "def forward(self" in text
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
