"""The linear layer of 16-bit inputs and fp32 weights against autograd's own, and the precision of
its weights' gradient.
"""

import pytest
import torch
import torch.nn.functional as F

from longctx.kernels.elementwise import linear
from longctx.model.layers import Linear
from tests.inputs import assert_gradients, inputs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_is_the_formula(dtype, bias):
    x, weight, b = inputs(2, 9, 13).to(dtype), inputs(7, 13, seed=1), inputs(7, seed=2)
    leaves = [t.requires_grad_() for t in (x, weight, b)[: 3 if bias else 2]]
    exact = [t.detach().to(dtype).double().requires_grad_() for t in leaves]
    actual, expected = linear(x, weight, b if bias else None), F.linear(*exact)
    close = (
        {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.03}
    )
    torch.testing.assert_close(actual.double(), expected, **close)
    assert_gradients(actual, expected, leaves, exact, **close)


def test_second_derivatives_are_refused():
    x, weight = inputs(4, 5).bfloat16().requires_grad_(), inputs(3, 5, seed=1).requires_grad_()
    squares = linear(x, weight, None).square().sum()
    (dx,) = torch.autograd.grad(squares, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_fp32_weights_is_not_rounded(compiled):
    layer, x = Linear(96, 64, bias=False).cuda(), inputs(4096, 96).bfloat16()
    run = torch.compile(layer) if compiled else layer
    dy = inputs(4096, 64, seed=1).bfloat16()
    with torch.autocast("cuda", torch.bfloat16):
        run(x).backward(dy)
    want = dy.double().t() @ x.double()
    assert layer.weight.grad is not None
    error = (layer.weight.grad.double() - want).norm() / want.norm()
    assert error < 1e-5  # rounded to bf16 it would be 2e-3
