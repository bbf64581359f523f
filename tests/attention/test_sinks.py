"""Learnable sinks: what attention gives with a column of logits that has no values."""

import pytest
import torch

from longctx.attention import Backend, Mask, attention
from longctx.attention.naive import visible
from longctx.kernels import HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASKS = {
    "causal": lambda: Mask.causal(),
    "window": lambda: Mask.causal(window=5),
    "full": lambda: Mask.full(),
    "documents": lambda: Mask.documents(torch.tensor([[0] * 7 + [1] * 1 + [2] * 29]).expand(2, -1)),
}


def formula(q, k, v, sinks, mask):
    """gpt-oss's softmax over the scores and the sink, whose column is then dropped; fp64."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    bound = mask.bind(q.shape[0], q.shape[1], k.shape[1], q.device)
    scores = scores.masked_fill(~visible(bound, k.shape[1]), float("-inf"))
    scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=3)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v)
    return out, scores.logsumexp(-1)


def tensors(Tq=37, Tk=37, heads=4, kv_heads=2, D=16):
    g = torch.Generator().manual_seed(0)
    shapes = (2, Tq, heads, D), (2, Tk, kv_heads, D), (2, Tk, kv_heads, D), (heads,)
    return [(torch.randn(*shape, generator=g) * 2).to(DEVICE).requires_grad_() for shape in shapes]


@pytest.fixture(params=["naive", "flash"])
def backend(request):
    return request.param


def check_against_formula(mask, backend, tokens):
    inputs = tensors(tokens, tokens)
    mask = MASKS[mask]().to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((2, tokens, 4, 16), (2, 4, tokens))
    ]
    *qkv, sinks = inputs
    actual = attention(*qkv, mask, backend, return_lse=True, sinks=sinks)
    expected = formula(*inputs, mask)
    gradients = [
        torch.autograd.grad(
            sum((x * w).sum() for x, w in zip(results, weights, strict=True)), inputs
        )
        for results in (actual, expected)
    ]
    for x, y in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_out_lse_and_gradients_are_those_of_the_formula(mask, backend):
    check_against_formula(mask, backend, tokens=37)


@pytest.mark.skipif(not HAS_TRITON or DEVICE != "cpu", reason="Triton's interpreter")
def test_gradients_with_the_portable_kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_against_formula("window", "flash", tokens=20)


def test_queries_that_see_nothing_give_zeros_and_no_gradient(backend):
    *qkv, sinks = tensors(Tq=9, Tk=4)
    out, lse = attention(*qkv, Mask.causal(), backend, return_lse=True, sinks=sinks)
    assert (out[:, :5] == 0).all()
    torch.testing.assert_close(lse[:, :, :5], sinks[:, None].expand(2, 4, 5))
    gradients = torch.autograd.grad(out.square().sum(), (*qkv, sinks))
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][:, :5] == 0).all() and gradients[3].abs().min() > 0


def test_a_sink_of_minus_infinity_is_none(backend):
    q, k, v, _ = (x.detach() for x in tensors())
    none = torch.full((4,), float("-inf"), device=DEVICE)
    assert torch.equal(
        attention(q, k, v, backend=backend, sinks=none), attention(q, k, v, backend=backend)
    )


def test_gradients_are_finite_where_a_query_has_neither_keys_nor_a_sink(backend):
    q, k, v, sinks = tensors(Tq=9, Tk=4)
    sinks = torch.full_like(sinks, float("-inf")).requires_grad_()
    out, lse = attention(q, k, v, Mask.causal(), backend, return_lse=True, sinks=sinks)
    assert (lse[:, :, :5] == float("-inf")).all()
    gradients = torch.autograd.grad(out.sum() + lse[:, :, 5:].sum(), (q, k, v, sinks))
    assert all(g.isfinite().all() for g in gradients)


def test_a_large_sink_takes_all_weight(backend):
    q, k, v, sinks = (x.detach() for x in tensors())
    assert attention(q, k, v, backend=backend, sinks=sinks + 200).abs().max() < 1e-30


def test_backend_without_gradient_of_its_lse_is_refused_where_one_is_wanted():
    *qkv, sinks = tensors()
    with pytest.raises(ValueError, match="attention=sdpa cannot train with sinks"):
        attention(*qkv, backend="sdpa", sinks=sinks)
    if DEVICE == "cpu":
        with torch.no_grad():
            out = attention(*qkv, backend="sdpa", sinks=sinks)
        torch.testing.assert_close(
            out.double(), formula(*qkv, sinks, Mask.causal())[0], atol=1e-5, rtol=0
        )
    assert not Backend.description.differentiable_lse


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(4, 1), torch.zeros(4).int()])
def test_sinks_of_another_shape_or_type_are_refused(wrong):
    *qkv, _ = tensors()
    with pytest.raises(ValueError, match=r"one number for each query head, \(4,\)"):
        attention(*qkv, sinks=wrong.to(DEVICE))
