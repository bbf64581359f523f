"""The chunked loss is cross-entropy: same value and gradients at every chunk size, by torch and by
the kernel, never the logits of a whole row.
"""

import itertools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.model.loss import ZLoss, linear_cross_entropy
from tests.inputs import DEVICE
from tests.live_memory import LiveMemory

N, C, V = 23, 12, 41
Leaves = Sequence[Tensor]


def inputs(
    dtype: torch.dtype, ignored: float = 0.3, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, C, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, C, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = -100
    leaves = [x.to(device, dtype).requires_grad_() for x in (hidden, weight)]
    return leaves[0], leaves[1], targets.to(device)


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = (hidden @ weight.t()).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), reduction=reduction)


class Way(NamedTuple):
    """What computes: the dtype and device that choose it, and how near to fp64 it comes."""

    dtype: torch.dtype
    device: str
    rtol: float
    atol: float


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    if request.param == "torch":
        return Way(torch.float64, "cpu", 1e-11, 1e-13)
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return Way(torch.float32, DEVICE, 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("reduction", "z_loss"), [*itertools.product(("mean", "sum"), (0.0, 0.03)), ("none", 0.0)]
)
@pytest.mark.parametrize("shape", [(1.0, None), (0.125, None), (1.7, 2.0)])
# Chunks are cut alike, whatever computes them, and the interpreter is slow
@pytest.mark.parametrize(
    ("way", "chunk", "factor"),
    [
        *(("torch", n, None) for n in (1, 7, N - 1, N, N + 1, 1000)),
        *(("torch", 5, 0.3), ("kernel", 7, None), ("kernel", 1000, 0.3)),
    ],
    indirect=["way"],
)
def test_loss_and_gradients_are_exact(chunk, factor, shape, reduction, z_loss, way):
    factor = None if reduction == "none" else factor
    *leaves, targets = inputs(way.dtype, device=way.device)
    *exact, _ = inputs(torch.float64, device=way.device)
    scale = None if factor is None else torch.tensor(factor, dtype=way.dtype, device=way.device)
    extra = ZLoss(z_loss) if z_loss else None
    loss = linear_cross_entropy(*leaves, targets, chunk, reduction, scale, *shape, extra)
    multiplier, cap = shape
    z = exact[0] @ exact[1].t() * multiplier
    z = z if cap is None else cap * torch.tanh(z / cap)
    expected = (factor or 1) * F.cross_entropy(z, targets, reduction=reduction)
    squares = z.logsumexp(-1).square()[targets != -100]
    if extra is not None:  # which is in the gradients alone
        torch.testing.assert_close(extra.mean.double(), squares.mean(), rtol=way.rtol, atol=0)
        squares = squares.mean() if reduction == "mean" else squares.sum()
        total = z_loss * squares * (factor or 1)
        expected = expected + total - total.detach()
    torch.testing.assert_close(loss.double(), expected, rtol=way.rtol / 10, atol=way.atol / 10)
    # Gradients differ from token to token, as those of a document's log-probability do
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(loss.shape, generator=generator, dtype=torch.float64).to(way.device)
    actual = torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
    want = torch.autograd.grad(expected, exact, upstream)
    for x, y in zip(actual, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=way.rtol, atol=way.atol)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_scored_gives_zero_and_zero_gradients(reduction):
    hidden, weight, targets = inputs(torch.float32, ignored=2.0)
    loss = linear_cross_entropy(hidden, weight, targets, 7, reduction)
    loss.backward()
    assert not loss and not hidden.grad.any() and not weight.grad.any()


def test_an_ignored_token_leaves_no_trace_even_if_it_is_not_finite():
    hidden, weight, targets = inputs(torch.float32)
    targets[3] = -100
    spoilt = hidden.detach().clone()
    spoilt[3] = float("nan")
    losses = (linear_cross_entropy(x, weight, targets, 4) for x in (hidden, spoilt))
    assert torch.equal(*(torch.autograd.grad(loss, weight)[0] for loss in losses))


@pytest.mark.parametrize("scale", [None, torch.tensor(0.3)])
def test_no_grad_gives_the_same_number(scale):
    hidden, weight, targets = inputs(torch.float32)
    trained = linear_cross_entropy(hidden, weight, targets, 6, "mean", scale)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, targets, 6, "mean", scale), trained)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_asked_for(reduction):
    hidden, weight, targets = inputs(torch.float64)
    for frozen, free in ((hidden, weight), (weight, hidden)):
        expected = reference(hidden, weight, targets, reduction).exp().sum()
        want = torch.autograd.grad(expected, free)[0]
        frozen.requires_grad_(False)
        losses = linear_cross_entropy(hidden, weight, targets, 5, reduction)
        torch.testing.assert_close(torch.autograd.grad(losses.exp().sum(), free)[0], want)
        frozen.requires_grad_()


def test_confident_tokens_keep_their_gradient_in_bf16():
    """p[t] = 1 - 1e-4 is 1 in bf16; its gradient p[t] - 1 is not 0."""
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    hidden = torch.tensor([[9.1875]], dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.tensor([0]), 1).backward()
    exact = hidden.detach().double().requires_grad_()
    reference(exact, weight.double(), torch.tensor([0]), "mean").backward()
    assert exact.grad.item() < -1e-5
    assert hidden.grad.item() == pytest.approx(exact.grad.item(), rel=1e-2)


def test_second_backward_is_refused():
    *leaves, targets = inputs(torch.float32)
    loss = linear_cross_entropy(*leaves, targets, 5)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="already taken"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction):
    hidden, weight, targets = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, targets, 5, reduction).sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize(
    ("device", "most"), [("cpu", 2e-2), pytest.param("cuda", 5e-2, marks=pytest.mark.gpu)]
)
def test_bf16_is_near_fp64(device, most, autocast, chunk, reduction):
    """On the same bf16 inputs, relative to the largest entry."""
    hidden, weight, targets = inputs(torch.bfloat16, device=device)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    leaves = [x.detach().float().requires_grad_() for x in exact] if autocast else [hidden, weight]
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(*leaves, targets, chunk, reduction).square().sum()
    loss.backward()
    expected = reference(*exact, targets, reduction).square().sum()
    expected.backward()
    assert loss.dtype == torch.float32
    assert (loss - expected).abs() < 1e-2 * expected
    for x, y in zip(leaves, exact, strict=True):
        assert x.grad.dtype == x.dtype
        assert (x.grad - y.grad).abs().max() < most * y.grad.abs().max()


def test_a_factor_of_the_loss_keeps_small_gradients_in_fp16():
    hidden, weight, targets = inputs(torch.float16, ignored=0.0)
    exact = inputs(torch.float64, ignored=0.0)
    factor = 2.0**20  # a GradScaler's, over the tokens of a long sequence
    loss = linear_cross_entropy(hidden, weight, targets, 5, scale=torch.tensor(1 / factor))
    (loss * factor).backward()
    reference(*exact, "mean").backward()
    for actual, expected in zip((hidden, weight), exact[:2], strict=True):
        assert (actual.grad - expected.grad).norm() <= 5e-3 * expected.grad.norm()


def test_many_chunks_lose_nothing_of_dw_in_bf16():
    """512 chunks added in bf16 would be wrong by several percent."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.rand(512, 4, generator=generator) + 0.5).bfloat16()
    weight = torch.zeros(5, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(5, (512,), generator=generator)
    linear_cross_entropy(hidden, weight, targets, 1, "sum").backward()
    exact = weight.detach().double().requires_grad_()
    reference(hidden.double(), exact, targets, "sum").backward()
    assert (weight.grad - exact.grad).abs().max() / exact.grad.abs().max() < 5e-3


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_of_one_chunk_at_most(reduction, trains):
    chunk, v, peaks = 16, 301, list[int]()
    for n in (chunk, 32 * chunk):
        hidden, weight = (torch.randn(x, 4, device=DEVICE, requires_grad=trains) for x in (n, v))
        targets = torch.randint(v, (n,), device=DEVICE)
        with LiveMemory() as live, warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = linear_cross_entropy(hidden, weight, targets, chunk, reduction, softcap=9.0)
            if trains:
                loss.sum().backward()
        peaks.append(live.peak)
    assert peaks[1] - peaks[0] < 4 * chunk * v
