"""Every command answers --help before torch is imported; paths and lists; exit codes."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tune import Options
from longctx import cli, system
from longctx.cli.commands import answer
from longctx.cli.options import CompareOptions, ExportOptions
from longctx.config import presets
from longctx.config.fields import key, keys
from tests.processes import ROOT, finished

SHARE = key(0.5, "a share", between=(0, 1))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_every_key_and_fits_80_columns(name, capsys):
    assert cli.main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    for option, declared in keys(cli.COMMANDS[name].schema).items():
        if not declared.is_group:
            shown = option.upper() if declared.positional else f"{option}="
            assert f"  {shown}" in text
            assert declared.meaning
    assert max(map(len, text.splitlines())) <= 80


def test_help_has_presets_ranges_and_choices():
    text = cli.commands.help_text(["train"])
    for group in ("attention", "model", "memory", "optimizer", "rope", "data", "strategy"):
        assert f"  {group}=" in text and all(name in text for name in presets.names(group))
    assert "  model=" not in cli.commands.help_text(["eval"])
    (share,) = cli.commands.key_lines(dataclasses.make_dataclass("A", [("x", float, SHARE)]))
    assert "0 to 1" in share


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_help_lists_the_commands(argv, capsys):
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert all(f"longctx {name}" in text for name in cli.COMMANDS)
    assert max(map(len, text.splitlines())) <= 80


STRANGE = ["a/lr=1, (a) {b}", "runs/lr=2", "runs/lr=3", "runs/out=3"]


# Lists are written with and without brackets, paths are taken as they are
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lengths=512,1024", "kernels=hopper"], Options(lengths=(512, 1024), kernels=("hopper",))),
        (["lengths=[512,1024]"], Options(lengths=(512, 1024))),
        ([*STRANGE, "out=x.html"], CompareOptions([*map(Path, STRANGE)], Path("x.html"))),
        (
            ["dtype=bf16", "runs/a", "out/"],
            ExportOptions(Path("runs/a"), Path("out"), dtype="bf16"),
        ),
    ],
)
def test_words_fill_the_options_of_a_command(words, expected):
    assert cli.compose(type(expected), words).config == expected


@pytest.mark.slow
def test_the_module_answers_from_any_folder_without_torch(tmp_path):
    code = (
        "import sys; from longctx import cli\n"
        "for name in cli.COMMANDS: assert cli.main([*name.split(), '--help']) == 0\n"
        "large = {'torch', 'numpy', 'rich', 'wandb', 'pyarrow', 'tokenizers'}\n"
        "assert not large & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    process = finished(ROOT / "longctx" / "__main__.py", ["compare", "none"], tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: none")


@pytest.mark.parametrize("words", [["train.py"], ["eval.py"], ["-m", "longctx"]])
def test_python_without_packages_says_how_to_get_them(words):
    command = [sys.executable, "-S", *words]  # without site-packages
    process = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True)
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert process.stderr.startswith(f"error: {sys.executable} lacks packages of longctx; `make")


def test_a_traceback_is_printed_if_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("LONGCTX_TRACEBACK", "1")
    assert cli.main(["train", "seq_len=abc"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_output_that_cannot_be_encoded_ends_nothing():
    called = "answer([], str, lambda argv: print('9 → 5 ▁ 3'))"
    code = f"from longctx.cli.commands import answer; exit({called})"
    process = finished("-c", [code], ROOT, PYTHONIOENCODING="latin-1")
    assert (process.returncode, process.stdout) == (0, "9 ? 5 ? 3\n"), process.stderr
    for command in (["-c", code], ["-m", "longctx", "--version"]):
        closed = ["-c", 'exec "$@" >&-', "sh", sys.executable, *command]
        process = subprocess.run(["sh", *closed], cwd=ROOT, stderr=subprocess.PIPE)
        assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("number", "handler", "code"),
    [
        *((number, signal.SIG_DFL, 128 + number) for number in system.SIGNALS),
        (signal.SIGHUP, signal.SIG_IGN, 0),  # under nohup
    ],
)
def test_a_signal_has_its_exit_code_even_behind_another_error(number, handler, code):
    def imports(argv: list[str]) -> int:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None
        return 0

    before = signal.signal(number, handler)
    try:
        assert answer([], str, imports) == code
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_a_mistake_found_while_a_signal_waits_is_printed(capsys):
    def saves(argv: list[str]) -> int:
        with system.caught() as stop:
            stop.waits = True
            signal.raise_signal(signal.SIGTERM)
            raise OSError("disk full")

    assert answer([], str, saves) == 2
    assert capsys.readouterr().err == "error: disk full\n"
