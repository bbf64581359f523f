"""flash on hard inputs: NaN around them, unaligned addresses, random lengths, repeats."""

import random

import pytest
import torch

from tests.attention.rule import NAMES, ON_GPU, Case, check, check_equal_runs, inputs, run

KERNELS = [
    pytest.param("auto", marks=pytest.mark.skipif(ON_GPU, reason="CPU tiles")),
    pytest.param("portable", marks=pytest.mark.gpu),
    *(pytest.param(f"ampere{x}", marks=pytest.mark.gpu) for x in ("", "-ordered")),
    pytest.param("hopper", marks=[pytest.mark.gpu, pytest.mark.hopper]),
    pytest.param("ordered", marks=[pytest.mark.gpu, pytest.mark.hopper]),
]
HEAD_DIM = 64 if ON_GPU else 16
DTYPE = torch.bfloat16
# of dq where it is added up in any order
CLOSE = 2e-2
MASKS = ("causal", "full", "window", "documents", "documents-window", "intervals")


@pytest.fixture(params=KERNELS)
def kernel(request):
    torch.use_deterministic_algorithms("ordered" in request.param, warn_only=True)
    return request.param


@pytest.fixture
def options(kernel):
    return {} if kernel in ("auto", "ordered") else {"kernel": kernel.removesuffix("-ordered")}


def views(x):
    """Views of x (B, T, H, D) at addresses and strides that tensor maps do not take; some have one
    value, token, head or row in the place of all.
    """
    B, T, H, D = x.shape
    shifted = [torch.empty(x.numel() + by, device=x.device, dtype=x.dtype)[by:] for by in (1, 4)]
    around = torch.full((B + 1, T + 50, H + 2, D + 8), float("nan"), device=x.device).to(x.dtype)
    odd = torch.empty(B, T, H, D + 1, device=x.device, dtype=x.dtype)
    return {
        "base off by 2 bytes": shifted[0].view(x.shape).copy_(x),
        "base off by 8 bytes": shifted[1].view(x.shape).copy_(x),
        "NaN around it": around[:B, 25 : 25 + T, 1 : 1 + H, :D].copy_(x),
        "odd strides": odd[..., :D].copy_(x),
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "channels apart": torch.stack([x, x], -1)[..., 0],
        "slice of a projection": torch.cat([x, x, x], 2)[:, :, H : 2 * H],
        "rows before tokens": x.transpose(0, 1).contiguous().transpose(0, 1),
        "one row": x[:1].expand_as(x),
        "one token": x[:, :1].expand_as(x),
        "one head": x[:, :, :1].expand_as(x),
        "one number": x[:1, :1, :1, :1].expand_as(x),
    }


def check_addresses(case, backend, close, **options):
    """Assert that views give what contiguous copies of them give, to `close`."""
    given, mask = [views(x) for x in inputs(case, DTYPE)], case.build_mask()
    for how in given[0]:
        each = [x[how] for x in given]
        expected = run([x.contiguous().clone() for x in each], mask, backend, DTYPE, **options)
        for x, y in zip(run(each, mask, backend, DTYPE, **options), expected, strict=True):
            torch.testing.assert_close(x, y, atol=close, rtol=0, msg=how)


def test_any_address_gives_what_a_copy_gives(kernel, options):
    close = 0 if kernel == "portable" or "ordered" in kernel else CLOSE
    check_addresses(Case(2, 131, 131, 4, 2, HEAD_DIM), "flash", close, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("T", [131, 256])
def test_any_address_gives_what_a_copy_gives_sdpa(mask, T):
    check_addresses(Case(2, T, T, 4, 2, 64, mask), "sdpa", CLOSE)


def random_case(draw, longest):
    """A case of random lengths, heads and mask; half of the lengths are powers of 2, give or take
    one.
    """

    def length():
        near = 2 ** draw.randint(0, longest.bit_length() - 1) + draw.randint(-1, 1)
        return min(max(draw.choice((near, draw.randint(1, longest))), 1), longest)

    kind, group, Tq, Tk = draw.choice(MASKS), draw.choice((1, 4)), length(), length()
    window = draw.randint(1, longest) if "window" in kind else None
    mask = {"window": "causal", "documents-window": "documents"}.get(kind, kind)
    rows = 2 if Tq * Tk < 1 << 22 else 1
    return Case(rows, Tq, Tq if mask == "documents" else Tk, 4, 4 // group, HEAD_DIM, mask, window)


def test_random_lengths_hold_the_rule(options):
    draw = random.Random(0)
    for _ in range(30 if ON_GPU else 10):
        check(random_case(draw, 2048 if ON_GPU else 70), "flash", DTYPE, **options)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256] if ON_GPU else [16])
def test_repeats_give_the_same_bits(kernel, options, head_dim):
    if "ampere" in kernel and head_dim == 192:
        pytest.skip("Ampere has no kernel of its own for heads of 192")
    T = 1000 if ON_GPU else 40
    case = Case(2, T, T, 8, 2, head_dim, "documents")
    # dq is added up in any order
    names = [name for name in NAMES if name != "dq" or kernel not in ("ampere", "hopper")]
    tensors = inputs(case, DTYPE)
    check_equal_runs(case, tensors, 100 if ON_GPU else 3, names=names, **options)
