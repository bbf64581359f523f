"""Exit codes, arguments given twice, and the garbage collector around large imports."""

import gc
import signal

import pytest

from longctx.cli import answer, libraries


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
        (["seq_len=64", "seq_len=64"], ""),
        (["compare", "runs/lr=1", "runs/lr=2"], ""),
    ],
)
def test_a_key_with_two_values_is_a_mistake(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []
    code = answer(overrides, lambda: "", calls.append)
    assert (code, calls) == ((2, []) if message else (0, [overrides]))
    assert message in capsys.readouterr().err


def test_ctrl_c_is_130_even_behind_another_error() -> None:
    def imports(argv: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None
        return 0

    # Ignored in what a shell runs in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert answer([], str, imports) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
