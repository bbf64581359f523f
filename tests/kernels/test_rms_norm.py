"""RMSNorm's kernels against fp64 at odd sizes; in Triton's interpreter, or on a GPU."""

from functools import partial, partialmethod

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from longctx.attention.description import AttentionConfig
from longctx.config.layout_config import MemoryConfig
from longctx.config.model_config import GPTConfig
from longctx.kernels.elementwise.rms_norm import add_and_norm, rms_norm, rms_norm_backward
from longctx.model.layers import Block
from longctx.model.rope import Rope
from tests.inputs import DEVICE, inputs

pytestmark = pytest.mark.usefixtures("interpreter")
EPS = 1e-5


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@pytest.mark.parametrize(
    ("N", "C"), [(1, 1), (3, 5), (7, 127), (40, 64), (9, 768), (5, 1025), (2, 4100)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("past", [False, True])
def test_forward_and_backward(N, C, dtype, past):
    x, dy, residual = (inputs(N, C, seed=seed).to(dtype) for seed in range(3))
    weight = 1 + inputs(C, seed=3)
    exact, w = x.double().requires_grad_(), weight.double().requires_grad_()
    want = norm(exact, w)
    dx_want, dw_want = torch.autograd.grad(want, (exact, w), dy.double())
    y, r = rms_norm(x, weight, EPS)
    dx, dw = rms_norm_backward(dy, x, r, weight, residual if past else None)
    close = (
        {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2e-2}
    )
    torch.testing.assert_close(y.double(), want.detach(), **close)
    dx_want = dx_want + residual.double() if past else dx_want
    torch.testing.assert_close(dx.double(), dx_want, **close)
    torch.testing.assert_close(dw.double(), dw_want, rtol=1e-4, atol=1e-4 * N**0.5)


@pytest.mark.parametrize("used", ["both", "residual", "norm"])
@pytest.mark.parametrize("branch", [False, True])
def test_gradients_of_residual_and_norm_add_up(branch, used):
    leaves = [inputs(2, 9, 24), inputs(24, seed=1), inputs(2, 9, 24, seed=2)][: 3 if branch else 2]
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    x, y = add_and_norm(leaves[0], leaves[2] if branch else None, leaves[1], EPS)
    total = exact[0] + exact[2] if branch else 1.0 * exact[0]
    pairs = list(zip((x, y), (total, norm(total, exact[1])), strict=True))
    for actual, expected in pairs:
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    pairs = {"both": pairs, "residual": pairs[:1], "norm": pairs[1:]}[used]
    douts = [inputs(2, 9, 24, seed=5 + n) for n in range(len(pairs))]
    grads = torch.autograd.grad([p[0] for p in pairs], leaves, douts, allow_unused=True)
    expected_grads = torch.autograd.grad(
        [p[1] for p in pairs], exact, [d.double() for d in douts], allow_unused=True
    )
    for a, b in zip(grads, expected_grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_residual_in_16_bits_is_rounded_once():
    a, b, weight = inputs(5, 33).half(), inputs(5, 33, seed=1).half(), inputs(33, seed=2)
    x, y = add_and_norm(a, b, weight, EPS)
    assert torch.equal(x, a + b)
    want = norm(x.double(), weight.double())
    torch.testing.assert_close(y.double(), want, rtol=2**-10, atol=1e-6)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts():
    N, C = 2**31 // 4096 + 5, 4096
    x = torch.empty(N, C, dtype=torch.bfloat16, device="cuda").normal_()
    dy, weight = torch.empty_like(x).normal_(), 1 + inputs(C)
    y, r = rms_norm(x, weight, EPS)
    dx, _ = rms_norm_backward(dy, x, r, weight, dy)
    some = [t[-5:].clone() for t in (x, dy)]
    y_want, r_want = rms_norm(some[0], weight, EPS)
    dx_want, _ = rms_norm_backward(some[1], some[0], r_want, weight, some[1])
    assert torch.equal(y[-5:], y_want)
    assert torch.equal(dx[-5:], dx_want)


@pytest.mark.parametrize("policy", ["fast", pytest.param("balanced", marks=pytest.mark.slow)])
def test_a_compiled_block_has_exact_gradients(policy, monkeypatch):
    from longctx.model import GPT

    config = GPTConfig(layers=2, channels=24, heads=3, kv_heads=1, ffn=40, vocab_size=61)
    tokens = torch.randint(61, (2, 33), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    grads = []
    for kernel in (True, False):
        torch.manual_seed(0)
        model = GPT(config, "naive", MemoryConfig(policy)).to(DEVICE)
        if kernel:
            monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
            monkeypatch.setattr(
                Block, "compile", partialmethod(Block.compile, backend="aot_eager", fullgraph=True)
            )
            model.compile_blocks()
        else:
            monkeypatch.setattr("longctx.model.layers.fused", lambda x: False)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("half", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_one_graph_serves_rows_of_any_length(half):
    config = GPTConfig(layers=1, channels=24, heads=3, kv_heads=1, ffn=40)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    block = Block(config.block(0), AttentionConfig("naive")).to(DEVICE, dtype)
    rope = Rope(8, 500_000.0)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(getattr(block, half), backend=counter, dynamic=True, fullgraph=True)
    for T in (9, 14, 30, 41, 55):
        x = inputs(1, T, 24).to(dtype).requires_grad_()
        others = (
            rope(torch.arange(T, device=DEVICE)[None])
            if half == "before"
            else [inputs(1, T, 3, 8).to(dtype)]
        )
        outputs = run(x, *others)
        torch.stack(
            [t.sum() for t in (outputs if half == "before" else [outputs])]
        ).sum().backward()
    assert counter.frame_count <= 2  # one for the first length, one for any other
