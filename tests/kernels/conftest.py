"""The interpreter of Triton, for tests that run our kernels also without a GPU."""

import pytest
import torch


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interprets the kernels where there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
