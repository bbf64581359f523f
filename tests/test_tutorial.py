"""The commands of docs/tutorial.md, run in their order as they stand there."""

import re
import shlex
from pathlib import Path

import pytest

from longctx import cli

ROOT = Path(__file__).parent.parent
COMMANDS = [
    line
    for block in re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.M | re.S
    )
    for line in block.splitlines()
]


@pytest.mark.slow  # half a minute: two small runs and an evaluation
def test_every_command_of_the_tutorial_does_what_it_is_there_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "longctx").symlink_to(ROOT / "longctx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    written = []
    for command in COMMANDS:
        words = shlex.split(command.removeprefix("python ").removeprefix("longctx "))
        words[0] = words[0].removesuffix(".py")
        assert cli.main(words) == 0, f"{command}\n{capsys.readouterr().err}"
        printed = capsys.readouterr()
        assert "warning" not in printed.err, f"{command}\n{printed.err}"
        written.append(printed.out)

    for run in ("short", "long"):
        assert (tmp_path / "runs" / run / "checkpoints" / "last.ckpt").exists()
    assert list((tmp_path / "runs" / "long" / "eval").glob("*.json"))
    assert (tmp_path / "compare.html").is_file()
    (text,) = (x for x, command in zip(written, COMMANDS, strict=True) if "generate" in command)
    assert "def forward(self" in text
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
