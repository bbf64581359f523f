"""What the command lines share, beside what test_config, test_train and test_eval see of it."""

import gc

import pytest

from longctx.options import libraries


def test_the_collector_rests_while_libraries_are_imported() -> None:
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
