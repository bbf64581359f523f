"""Rope's kernels against the formula in fp64 at odd sizes; in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor

from longctx.kernels.elementwise.rotary import rope, rope_backward, rotated
from longctx.model.rope import Rope, rotate
from tests.inputs import DEVICE, inputs

pytestmark = pytest.mark.usefixtures("interpreter")


def angles(B: int, T: int, D: int) -> tuple[Tensor, Tensor]:
    positions = torch.randint(100_000, (B, T), generator=torch.Generator().manual_seed(7))
    cos, sin = Rope(D, 500_000.0)(positions)
    return cos.to(DEVICE), sin.to(DEVICE)


@pytest.mark.parametrize(("rows", "dtype"), [((2, 5), torch.float32), ((1, 11), torch.float16)])
@pytest.mark.parametrize(
    ("H", "G", "D"),
    [(1, 1, 2), (3, 1, 6), (4, 2, 32), (12, 12, 64), (5, 5, 96), (32, 8, 64), (3, 3, 258)],
)
def test_forward_and_backward(rows, H, G, D, dtype):
    qkv, (cos, sin) = inputs(*rows, (H + 2 * G) * D).to(dtype).requires_grad_(), angles(*rows, D)
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.unflatten(-1, (-1, D)).split((H, G, G), dim=2)
    expected = rotate(q, cos.double(), sin.double()), rotate(k, cos.double(), sin.double()), v
    actual = rotated(qkv, cos, sin, H, G)
    close = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-9, "atol": 2e-3}
    )
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, **close)
    assert torch.equal(actual[2], qkv.detach().unflatten(-1, (-1, D))[:, :, H + G :])
    douts = [inputs(*t.shape, seed=n + 1).to(dtype) for n, t in enumerate(actual)]
    (dqkv,) = torch.autograd.grad(actual, qkv, douts)
    (dexpected,) = torch.autograd.grad(expected, exact, [d.double() for d in douts])
    torch.testing.assert_close(dqkv.double(), dexpected, **close)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts():
    H, G, D = 32, 8, 64
    N = 2**31 // ((H + 2 * G) * D) + 5
    qkv = torch.empty(N, (H + 2 * G) * D, dtype=torch.bfloat16, device="cuda").normal_()
    cos, sin = inputs(N, D // 2), inputs(N, D // 2, seed=1)
    q, k = rope(qkv, cos, sin, H, G)
    dqkv = rope_backward(q, k, k, cos, sin)
    last = [t[-5:].clone() for t in (qkv, cos, sin)]
    q_want, k_want = rope(*last, H, G)
    assert torch.equal(q[-5:], q_want)
    assert torch.equal(k[-5:], k_want)
    assert torch.equal(dqkv[-5:], rope_backward(q_want, k_want, k_want, *last[1:]))
