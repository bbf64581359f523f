"""Norm, rope, SwiGLU and the linear layer against their formulas in fp64 at odd sizes."""

from functools import partial, partialmethod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from longctx.attention.description import AttentionConfig
from longctx.config.layout_config import MemoryConfig
from longctx.kernels.elementwise import linear
from longctx.kernels.elementwise.rms_norm import add_and_norm, rms_norm, rms_norm_backward
from longctx.kernels.elementwise.rotary import rope, rope_backward, rotated
from longctx.kernels.elementwise.swiglu import gated_down, swiglu, swiglu_backward
from longctx.model import GPT
from longctx.model.layers import MLP, Block, Linear
from longctx.model.rope import Rope, rotate
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import RopeSpec
from tests.inputs import DEVICE, assert_formula, inputs

pytestmark = pytest.mark.usefixtures("interpreter")
EPS = 1e-5


# The linear layer of 16-bit inputs and fp32 weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float32, 1e-4, 1e-4), *((x, 2**-7, 0.03) for x in (torch.bfloat16, torch.float16))],
)
def test_linear_is_the_formula(dtype, rtol, atol, bias):
    x, weight, b = inputs(2, 9, 13).to(dtype), inputs(7, 13, seed=1), inputs(7, seed=2)
    leaves = [t.requires_grad_() for t in (x, weight, b)[: 3 if bias else 2]]
    exact = [t.detach().to(dtype).double().requires_grad_() for t in leaves]
    actual = linear(x, weight, b if bias else None)
    assert_formula([actual], [F.linear(*exact)], leaves, exact, rtol=rtol, atol=atol)


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


# Rope


def angles(B: int, T: int, D: int) -> tuple[Tensor, Tensor]:
    positions = torch.randint(100_000, (B, T), generator=torch.Generator().manual_seed(7))
    cos, sin = Rope(RopeSpec(D, 500_000.0, {}, None))(positions)
    return cos.to(DEVICE), sin.to(DEVICE)


@pytest.mark.parametrize(
    ("rows", "dtype", "rtol", "atol"),
    [((2, 5), torch.float32, 1e-5, 1e-5), ((1, 11), torch.float16, 2**-9, 2e-3)],
)
@pytest.mark.parametrize(
    ("H", "G", "D"),
    [(1, 1, 2), (3, 1, 6), (4, 2, 32), (12, 12, 64), (5, 5, 96), (32, 8, 64), (3, 3, 258)],
)
def test_rope_is_the_formula(rows, H, G, D, dtype, rtol, atol):
    qkv, (cos, sin) = inputs(*rows, (H + 2 * G) * D).to(dtype).requires_grad_(), angles(*rows, D)
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.unflatten(-1, (-1, D)).split((H, G, G), dim=2)
    expected = rotate(q, cos.double(), sin.double()), rotate(k, cos.double(), sin.double()), v
    actual = rotated(qkv, cos, sin, H, G)
    assert torch.equal(actual[2], qkv.detach().unflatten(-1, (-1, D))[:, :, H + G :])
    assert_formula(actual, expected, [qkv], [exact], rtol=rtol, atol=atol)


@pytest.mark.gpu
def test_rope_of_more_elements_than_an_int32_counts():
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


# SwiGLU


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize(("N", "width"), [(1, 1), (3, 5), (7, 127), (2, 128), (5, 2049), (2, 4100)])
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2**-7, 1e-2)]
)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_swiglu_is_the_formula(N, width, dtype, rtol, atol, activation):
    gate_up, dact = (3 * inputs(N, 2 * width)).to(dtype), inputs(N, width, seed=1).to(dtype)
    exact = gate_up.double().requires_grad_()
    want = gated(exact, activation)
    (dwant,) = torch.autograd.grad(want, exact, dact.double())
    dgate_up, again = swiglu_backward(gate_up, dact, activation)
    found = [x.double() for x in (swiglu(gate_up, activation), again, dgate_up)]
    expected = [want.detach(), want.detach(), dwant]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("with_output", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_with_the_down_projection(bias, with_output):
    leaves = [inputs(2, 9, 26), inputs(6, 13, seed=1), inputs(6, seed=2)][: 3 if bias else 2]
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    actual = gated_down(leaves[0], leaves[1], leaves[2] if bias else None, with_output)
    expected = F.linear(gated(exact[0]), *exact[1:])
    expected = expected if with_output else expected - expected.detach()
    assert_formula([actual], [expected], leaves, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_layer_is_the_formula_and_saves_no_activation(activation):
    dtype, sizes = torch.float32 if DEVICE == "cpu" else torch.bfloat16, []
    config = GPTConfig(channels=16, ffn=24, activation=activation)
    layer = MLP(config.block(0).mlp).to(DEVICE, dtype)
    x = inputs(3, 11, 16).to(dtype)
    noted = lambda t: sizes.append(t.numel()) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda t: t):
        y = layer(x)
    if DEVICE == "cpu":
        want = layer.down(gated(layer.gate_up(x), activation))
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    assert 3 * 11 * 24 not in sizes and 3 * 11 * 48 in sizes


def test_swiglu_compiles_with_weights_cast_by_autocast():
    layer, x = MLP(GPTConfig(channels=16, ffn=24).block(0).mlp).to(DEVICE), inputs(3, 11, 16)
    grads = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            run(x).float().square().mean().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    for a, b in zip(*grads, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() <= 1e-2 * b.norm()


# RMSNorm


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@pytest.mark.parametrize(
    ("N", "C"), [(1, 1), (3, 5), (7, 127), (40, 64), (9, 768), (5, 1025), (2, 4100)]
)
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 2**-7, 2e-2)]
)
@pytest.mark.parametrize("past", [False, True])
def test_rms_norm_is_the_formula(N, C, dtype, rtol, atol, past):
    x, dy, residual = (inputs(N, C, seed=seed).to(dtype) for seed in range(3))
    weight = 1 + inputs(C, seed=3)
    exact, w = x.double().requires_grad_(), weight.double().requires_grad_()
    want = norm(exact, w)
    dx_want, dw_want = torch.autograd.grad(want, (exact, w), dy.double())
    y, r = rms_norm(x, None, weight, EPS)
    dx, dw = rms_norm_backward(dy, x, r, weight, residual if past else None)
    expected = [want.detach(), dx_want + residual.double() if past else dx_want]
    torch.testing.assert_close([y.double(), dx.double()], expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(dw.double(), dw_want, rtol=1e-4, atol=1e-4 * N**0.5)


@pytest.mark.parametrize("used", ["both", "residual", "norm"])
@pytest.mark.parametrize("branch", [False, True])
def test_gradients_of_residual_and_norm_add_up(branch, used):
    leaves = [inputs(2, 9, 24), inputs(24, seed=1), inputs(2, 9, 24, seed=2)][: 3 if branch else 2]
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    x, y = add_and_norm(leaves[0], leaves[2] if branch else None, leaves[1], EPS)
    total = exact[0] + exact[2] if branch else 1.0 * exact[0]
    place = {"both": slice(2), "residual": slice(1), "norm": slice(1, 2)}[used]
    expected = total, norm(total, exact[1])
    assert_formula((x, y)[place], expected[place], leaves, exact, rtol=1e-4, atol=1e-4)


def test_residual_in_16_bits_is_rounded_once():
    a, b, weight = inputs(5, 33).half(), inputs(5, 33, seed=1).half(), inputs(33, seed=2)
    x, y = add_and_norm(a, b, weight, EPS)
    assert torch.equal(x, a + b)
    want = norm(x.double(), weight.double())
    torch.testing.assert_close(y.double(), want, rtol=2**-10, atol=1e-6)


@pytest.mark.gpu
def test_norm_of_more_elements_than_an_int32_counts():
    N, C = 2**31 // 4096 + 5, 4096
    x = torch.empty(N, C, dtype=torch.bfloat16, device="cuda").normal_()
    dy, weight = torch.empty_like(x).normal_(), 1 + inputs(C)
    y, r = rms_norm(x, None, weight, EPS)
    dx, _ = rms_norm_backward(dy, x, r, weight, dy)
    some = [t[-5:].clone() for t in (x, dy)]
    y_want, r_want = rms_norm(some[0], None, weight, EPS)
    dx_want, _ = rms_norm_backward(some[1], some[0], r_want, weight, some[1])
    assert torch.equal(y[-5:], y_want)
    assert torch.equal(dx[-5:], dx_want)


@pytest.mark.parametrize("policy", ["fast", pytest.param("balanced", marks=pytest.mark.slow)])
def test_a_compiled_block_has_exact_gradients(policy, monkeypatch):
    config = GPTConfig(layers=2, channels=24, heads=3, kv_heads=1, ffn=40, vocab_size=61)
    tokens = torch.randint(61, (2, 33), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    eager = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", eager)
    block = partialmethod(Block.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(Block, "compile", block)
    grads = []
    for kernel in (True, False):
        torch.manual_seed(0)
        model = GPT(config, "naive", MemoryConfig(policy)).to(DEVICE)
        if kernel:
            model.compile_blocks()
        else:
            monkeypatch.setattr("longctx.model.layers.fused", lambda x: False)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("half", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_one_graph_serves_rows_of_any_length(half):
    config = GPTConfig(layers=1, channels=24, heads=3, kv_heads=1, ffn=40)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    block = Block(config.block(0), AttentionConfig("naive")).to(DEVICE, dtype)
    rope = Rope(RopeSpec(8, 500_000.0, {}, None))
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(getattr(block, half), backend=counter, dynamic=True, fullgraph=True)
    for T in (9, 14, 30, 41, 55):
        x = inputs(1, T, 24).to(dtype).requires_grad_()
        if half == "before":
            outputs = run(x, *rope(torch.arange(T, device=DEVICE)[None]))
        else:
            outputs = [run(x, inputs(1, T, 3, 8).to(dtype))]
        sum(t.sum() for t in outputs).backward()
    assert counter.frame_count <= 2  # one for the first length, one for any other
