"""Every command answers --help and refuses mistakes with one line that names the key, before torch
is imported.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.tune import Options
from longctx import cli
from longctx.config.command_config import CompareOptions, ExportOptions
from longctx.config.fields import key

ROOT = Path(__file__).resolve().parents[2]


def leaves(schema: type) -> Iterator[tuple[str, dataclasses.Field]]:
    """Dotted key and field of every value in `schema`."""
    for item in dataclasses.fields(schema):
        if isinstance(item.default_factory, type) and dataclasses.is_dataclass(
            item.default_factory
        ):
            for name, inner in leaves(item.default_factory):
                yield f"{item.name}.{name}", inner
        else:
            yield item.name, item


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_every_key_and_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    for option, item in leaves(cli.COMMANDS[name].schema):
        shown = option.upper() if item.metadata["positional"] else f"{option}="
        assert f"  {shown}" in text
        assert item.metadata["help"]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", ["train", "eval", "data"])
def test_help_has_every_preset(command: str) -> None:
    text = cli.help_text(command)
    for group in cli.groups(command):
        assert all(name in text for name in cli.names(group))


def test_help_shows_ranges_and_choices() -> None:
    @dataclasses.dataclass
    class Options:
        share: float = key(0.5, "a share", between=(0, 1))
        kind: str = key("a", "a kind", choices=("a", "bb"))

    share, kind = cli.key_lines(Options)
    assert "0 to 1" in share
    assert "a | bb" in kind


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert all(f"longctx {name}" in text for name in cli.COMMANDS)
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", "--help"]) == 0
    text = capsys.readouterr().out
    assert "kernels show" in text and "watch" not in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["wacth"], "did you mean watch?"),
        (["bench"], "bench: not a command"),
        (["kernels"], "kernels show"),
        (["kernels", "tune"], "python -m benchmarks tune"),
        (["watch"], "RUN is missing"),
        (["watch", "runs/a", "runs/b"], "runs/b: one too many"),
        (["watch", "runs/none"], "runs/none: no such folder"),
        (["watch", "run=runs/a"], "run=runs/a: give it without run="),
        (["compare"], "RUNS is missing"),
        (["compare", "outt=x"], "did you mean out?"),
        (["export", "runs/a", "out", "dtype=int4"], "dtype=int4: one of fp32, bf16, fp16"),
        (["export", "runs/a", "out", "adapter=perhaps"], "adapter=perhaps: must be true or false"),
        (["export", "runs/a", "out", "shard_gb=null"], "shard_gb=null: not allowed; give a number"),
        (["dashboard", "--project", "p"], "--project: not an option"),
        (["data", "-m", "seq_len=64,128"], "-m: only train sweeps"),
        (["eval", "-m", "checkpoint=a,b"], "-m: only train sweeps"),
        (["plan", "-m", "seq_len=64,128"], "-m: only train sweeps"),
        (["kernels", "show", "head_size=x"], "head_size=x: must be a whole number"),
        (["kernels", "show", "head_size=0"], "head_size=0"),
        (["kernels", "show", "kernel=a,b"], "kernel=a,b: several values"),
        (["kernels", "show", r"dtype=$\{oc.env:HOME}"], "dtype=$"),
        (["train", "seq_len=abc"], "seq_len=abc: must be a whole number, or max"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    argv: list[str], message: str, refused: Callable[[int, str], str]
) -> None:
    refused(cli.main(argv), message)


def test_lists_are_written_with_and_without_brackets() -> None:
    for argument in ("lengths=512,1024", "lengths=[512,1024]"):
        assert cli.options(Options, [argument]) == Options(lengths=(512, 1024))
    assert cli.options(Options, ["kernels=hopper"]).kernels == ("hopper",)


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    strange = tmp_path / "lr=1, (a) {b}"
    strange.mkdir()
    runs = [str(strange), "runs/lr=2", "runs/out=3"]
    assert cli.options(CompareOptions, [*runs, "out=x.html"]) == CompareOptions(runs, "x.html")
    exported = cli.options(ExportOptions, ["dtype=bf16", "runs/a", "out/"])
    assert (exported.run, exported.out, exported.dtype) == ("runs/a", "out/", "bf16")


@pytest.mark.slow
def test_the_module_answers_from_any_folder_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from longctx import cli\n"
        "for name in cli.COMMANDS: assert cli.main([*name.split(), '--help']) == 0\n"
        "large = {'torch', 'hydra', 'numpy', 'rich', 'wandb', 'pyarrow', 'tokenizers'}\n"
        "assert not large & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    process = subprocess.run(
        [sys.executable, str(ROOT / "longctx" / "__main__.py"), "watch", "none"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: none")
