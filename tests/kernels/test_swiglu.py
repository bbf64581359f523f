"""SwiGLU's kernels against fp64 at odd sizes; in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.config.model_config import GPTConfig
from longctx.kernels.elementwise.swiglu import gated_down, swiglu, swiglu_backward
from longctx.model.layers import SwiGLU
from tests.inputs import DEVICE, assert_gradients, inputs

pytestmark = pytest.mark.usefixtures("interpreter")


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize(("N", "width"), [(1, 1), (3, 5), (7, 127), (2, 128), (5, 2049), (2, 4100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_forward_and_backward(N, width, dtype, activation):
    gate_up, dact = (3 * inputs(N, 2 * width)).to(dtype), inputs(N, width, seed=1).to(dtype)
    exact = gate_up.double().requires_grad_()
    want = gated(exact, activation)
    (dwant,) = torch.autograd.grad(want, exact, dact.double())
    dgate_up, again = swiglu_backward(gate_up, dact, activation)
    close = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    )
    torch.testing.assert_close(swiglu(gate_up, activation).double(), want.detach(), **close)
    torch.testing.assert_close(again.double(), want.detach(), **close)
    torch.testing.assert_close(dgate_up.double(), dwant, **close)


@pytest.mark.parametrize("with_output", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_with_the_down_projection(bias, with_output):
    leaves = [inputs(2, 9, 26), inputs(6, 13, seed=1), inputs(6, seed=2)][: 3 if bias else 2]
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    actual = gated_down(leaves[0], leaves[1], leaves[2] if bias else None, with_output)
    expected = F.linear(gated(exact[0]), exact[1], exact[2] if bias else None)
    torch.testing.assert_close(
        actual.double(), expected if with_output else 0 * expected, rtol=1e-4, atol=1e-4
    )
    assert_gradients(actual, expected, leaves, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_layer_is_the_formula_and_saves_no_activation(activation):
    config = GPTConfig(channels=16, ffn=24, activation=activation)
    layer = SwiGLU(config.block(0).mlp).to(DEVICE)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    x = inputs(3, 11, 16).to(dtype)
    layer = layer.to(dtype)
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):  # type: ignore[func-returns-value]
        y = layer(x)
    want = layer.down(gated(layer.gate_up(x), activation))
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4) if DEVICE == "cpu" else None
    assert 3 * 11 * 24 not in sizes
    assert 3 * 11 * 48 in sizes


def test_it_compiles_with_weights_cast_by_autocast():
    layer = SwiGLU(GPTConfig(channels=16, ffn=24).block(0).mlp).to(DEVICE)
    x = inputs(3, 11, 16)
    grads = []
    for compiled in (False, True):
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        layer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            run(x).float().square().mean().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    for a, b in zip(*grads, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 1e-2 * b.norm()
