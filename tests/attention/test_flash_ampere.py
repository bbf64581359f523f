"""flash with kernel=ampere: the correctness rule over the grid, with the tiles of every card."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longctx.attention import check, kernels_run
from longctx.kernels import HAS_TRITON, flash_op
from longctx.kernels.attention import IMPLEMENTATIONS
from tests.attention import rule
from tests.attention.rule import FREE, GRID, ON_GPU, Case

if HAS_TRITON and ON_GPU:  # Gluon has no interpreter
    from longctx.kernels.attention import ampere

every_size = pytest.mark.parametrize("head_dim", IMPLEMENTATIONS["triton-ampere"].head_sizes)


@pytest.fixture(params=[163, 99])
def tiles(request, monkeypatch):
    """Take the tiles of cards with so many KiB of shared memory."""
    monkeypatch.setattr(ampere, "shared_memory", lambda device: request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_size
@pytest.mark.parametrize("case", GRID + FREE, ids=str)
def test_rule(case, head_dim, dtype, tiles):
    rule.check(replace(case, D=head_dim), "flash", dtype, kernel="ampere")
    assert kernels_run()["flash"] == "triton-ampere"


@pytest.mark.gpu
@every_size
def test_softcap_is_that_of_naive(head_dim, tiles):
    case = Case(2, 300, 300, Hq=4, Hkv=2, D=head_dim, mask="documents")
    large = [3 * x for x in rule.inputs(case, torch.bfloat16)]
    rule.check(case, "flash", torch.bfloat16, large, softcap=20.0, kernel="ampere")


@pytest.mark.gpu
def test_ordered_runs_repeat_to_the_bit():
    case = Case(2, 1000, 1000, Hq=8, Hkv=2, D=128, mask="documents")
    tensors = rule.inputs(case, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    rule.check(case, "flash", torch.bfloat16, tensors=tensors, kernel="ampere")
    assert kernels_run()["flash"] == "triton-ampere-ordered"
    rule.check_equal_runs(case, tensors, 19, kernel="ampere")


@pytest.mark.parametrize(
    ("major", "head_dim", "expected"),
    [
        *((7, 128, "portable"), (8, 128, "ampere"), (8, 80, "portable")),
        *((9, 128, "hopper"), (10, 128, "portable"), (12, 96, "ampere")),
    ],
)
def test_auto_by_generation(major, head_dim, expected, monkeypatch):
    gpu, half = torch.device("cuda", 0), torch.bfloat16
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(flash_op, "_properties", lambda device: properties)
    assert flash_op.implementation(gpu, half, head_dim) == f"triton-{expected}"
    assert flash_op.implementation(gpu, torch.float32, head_dim) == "triton-portable"


def test_other_sizes_and_devices_are_refused():
    request = {"device": rule.DEVICE, "dtype": torch.bfloat16, "head_dim": 80}
    with pytest.raises(ValueError, match="head sizes in "):
        check("flash", **request, options={"kernel": "ampere"})
