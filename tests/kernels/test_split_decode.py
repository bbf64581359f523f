"""Decoding's kernels against naive attention in fp64 at odd sizes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from longctx.attention import Mask, attention
from longctx.kernels.attention.decoding import decode
from tests.inputs import DEVICE

pytestmark = pytest.mark.usefixtures("interpreter")
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}


def inputs(B: int, T: int, Hq: int, Hkv: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(B + T + D)
    shapes = ((B, Hq, D), (B, T, Hkv, D), (B, T, Hkv, D))
    q, k, v = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    return q, k, v


def places(*each: int) -> Tensor:
    return torch.tensor(each, dtype=torch.int32, device=DEVICE)


def check(
    qkv: Sequence[Tensor], first: Tensor, last: Tensor, parts: int | None = None, alone: bool = True
) -> None:
    """Compare `decode` in so many parts with naive attention, without sinks and biases, with both,
    and with each `alone`.
    """
    mask = Mask.intervals(first[:, None], last[:, None])
    q, k, v = (x.double() for x in qkv)
    sinks = inputs(1, 1, q.shape[1], 1, 1)[0].flatten()
    bias = inputs(1, k.shape[1], q.shape[1], 1, 1)[1].expand(q.shape[0], -1, q.shape[1], -1)[..., 0]
    rising = 1000.0 * torch.arange(q.shape[1], device=DEVICE)[:, None]
    bias = bias.transpose(1, 2).contiguous() + rising
    several = ((None, None), (sinks, None), (None, bias), (sinks, bias))
    for learned in several if alone else several[::3]:
        out = decode(*qkv, first, last, q.shape[-1] ** -0.5, parts, *learned)
        given = dict(zip(("sinks", "key_bias"), learned, strict=True))
        expected = attention(q[:, None], k, v, mask=mask, backend="naive", **given)[:, 0]
        assert out.dtype == qkv[0].dtype
        torch.testing.assert_close(out.double(), expected, **CLOSE[out.dtype])


@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "parts"),
    [
        *((1, 1, 32, None), (6, 2, 16, 1), (3, 3, 64, 3), (9, 1, 80, None)),
        *((8, 2, 128, 5), (20, 1, 24, 2), (4, 2, 256, 3)),
    ],
)
def test_equals_naive_attention(Hq, Hkv, D, parts):
    first, last = places(0, 0, 31), places(148, 0, 97)  # all keys, one, a window of 67
    qkv = inputs(3, 149, Hq, Hkv, D)
    # Rounded once in fp16
    check(qkv if D % 32 else [x.half() for x in qkv], first, last, parts)


@pytest.mark.parametrize("width", [1, 63, 64, 65])
def test_lengths_around_a_tile(width):
    last = places(139, width)
    first = (last - (width - 1)).clamp(min=0).int()
    for parts in (1, 2, 7):  # the last ones may have no keys
        check(inputs(2, 140, 4, 2, 64), first, last, parts, alone=False)


def test_keys_that_are_not_seen_are_not_read():
    q, k, v = inputs(2, 40, 2, 1, 32)
    first, last = places(3, 0), places(20, 33)
    expected = decode(q, k, v, first, last, 0.2)
    for row, (begin, end) in enumerate(((3, 20), (0, 33))):
        for x in (k, v):
            x[row, :begin] = float("nan")
            x[row, end + 1 :] = float("inf")
    assert torch.equal(decode(q, k, v, first, last, 0.2), expected)


def test_a_row_that_sees_nothing_gets_zeros():
    q, k, v = inputs(2, 20, 2, 2, 32)
    out = decode(q, k, v, places(0, 5), places(9, 4), 0.2)
    assert not out[1].any()
    assert out[0].all()


def test_strided_caches_are_read_in_place():
    q, k, v = inputs(2, 50, 4, 2, 32)
    wide = torch.cat([k, v], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
    halves = wide[..., :32], wide[..., 32:]
    first, last = places(0, 7), places(49, 30)
    assert torch.equal(decode(q, *halves, first, last, 0.2), decode(q, k, v, first, last, 0.2))
