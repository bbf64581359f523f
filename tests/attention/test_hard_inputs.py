"""flash on hard inputs: NaN that nothing sees, odd addresses, random lengths, repeats."""

import random

import pytest
import torch

from tests.attention import hard_inputs
from tests.attention.rule import ON_GPU, Case

KERNELS = [
    pytest.param("auto", marks=pytest.mark.skipif(ON_GPU, reason="CPU tiles")),
    pytest.param("portable", marks=pytest.mark.gpu),
    pytest.param("ampere", marks=pytest.mark.gpu),
    pytest.param("hopper", marks=[pytest.mark.gpu, pytest.mark.hopper]),
    pytest.param("ordered", marks=[pytest.mark.gpu, pytest.mark.hopper]),
]
HEAD_DIM = 64 if ON_GPU else 16
DTYPE = torch.bfloat16
# of dq where it is added up in any order
CLOSE = 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("T", [77, 257])
@pytest.mark.parametrize("mask", ["documents", "intervals"])
@pytest.mark.parametrize("window", [None, 20])
def test_nan_that_nothing_sees_changes_nothing(T, mask, window):
    """Of the portable kernels; those of Hopper multiply it by 0 where it shares a tile."""
    case = Case(2, T, T, 4, 2, HEAD_DIM, mask, window if mask == "documents" else None)
    for name, (same, _) in hard_inputs.poisoned(case, DTYPE, "portable").items():
        assert same, name


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_address_gives_what_a_copy_gives(kernel):
    for how, difference in hard_inputs.misaddressed(
        Case(2, 131, 131, 4, 2, HEAD_DIM), DTYPE, kernel
    ).items():
        assert difference <= (0 if kernel in ("portable", "ordered") else CLOSE), how


@pytest.mark.parametrize("kernel", KERNELS)
def test_random_lengths_are_as_exact_as_torchs_kernel(kernel):
    draw = random.Random(0)
    for _ in range(30 if ON_GPU else 10):
        case = hard_inputs.random_case(draw, 2048 if ON_GPU else 70, HEAD_DIM)
        ratio, name = hard_inputs.error_ratio(case, DTYPE, kernel)
        assert ratio <= 1, f"{name} of {case}"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256] if ON_GPU else [16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_repeats_give_the_same_bits(kernel, head_dim):
    if (kernel, head_dim) == ("ampere", 192):
        pytest.skip("Ampere has no kernel of its own for heads of 192")
    T = 1000 if ON_GPU else 40
    case = Case(2, T, T, 8, 2, head_dim, "documents")
    differing = hard_inputs.other_bits(case, DTYPE, 100 if ON_GPU else 3, kernel)
    if kernel in ("ampere", "hopper"):  # dq is added up in any order
        del differing["dq"]
    assert not any(differing.values()), differing
