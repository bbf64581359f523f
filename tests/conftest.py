"""Without a GPU the Triton kernels run in Triton's interpreter, which has to be chosen before triton is first imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import longctx.kernels.cross_entropy
    import longctx.kernels.portable
    import longctx.kernels.swiglu  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
