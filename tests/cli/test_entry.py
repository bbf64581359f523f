"""Exit codes, arguments given twice, and the garbage collector around large imports."""

import gc
import os
import signal
import subprocess
import sys

import pytest

from longctx import stop_signal
from longctx.cli import answer, libraries
from tests.processes import PYTHONPATH


def test_the_collector_pauses_while_libraries_are_imported() -> None:
    before = gc.get_freeze_count()
    try:
        with libraries():
            assert not gc.isenabled()
            with libraries():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > before
        with pytest.raises(ImportError), libraries():
            import longctx.nowhere  # noqa: F401
        assert gc.isenabled()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seq_len=64", "model=tiny", "seq_len=128"], "seq_len=128: seq_len=64 is given too"),
        (["++model.layers=2", "model.layers=3"], "model.layers=3: model.layers=2 is given too"),
        (["sample_prompt=x\udcff"], r"sample_prompt=x\udcff: not text"),
        (["seq_len=64", "seq_len=64"], ""),
        (["compare", "runs/lr=1", "runs/lr=2"], ""),
    ],
)
def test_a_key_with_two_values_or_bytes_that_are_no_text_is_a_mistake(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []
    code = answer(overrides, lambda: "", calls.append)
    assert (code, calls) == ((2, []) if message else (0, [overrides]))
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii"])
def test_output_that_cannot_be_encoded_ends_nothing(encoding: str) -> None:
    code = "from longctx.cli import answer; exit(answer([], str, lambda argv: print('9 → 5 ▁ 3')))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "PYTHONIOENCODING": encoding},
        capture_output=True,
    )
    assert (process.returncode, process.stdout) == (0, b"9 ? 5 ? 3\n"), process.stderr


@pytest.mark.parametrize("number", stop_signal.SIGNALS)
def test_a_signal_has_its_exit_code_even_behind_another_error(number: int) -> None:
    def imports(argv: list[str]) -> int:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None
        return 0

    # Ignored in what a shell runs in the background
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert answer([], str, imports) == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_command_that_is_told_to_outlive_its_terminal_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert answer([], str, lambda argv: signal.raise_signal(signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_mistake_found_while_a_signal_waits_is_still_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def saves(argv: list[str]) -> int:
        with stop_signal.caught() as stop:
            stop.waits = True
            signal.raise_signal(signal.SIGTERM)
            raise OSError("disk full")

    assert answer([], str, saves) == 2
    assert capsys.readouterr().err == "error: disk full\n"
