"""softcap: scores become c · tanh(score / c) before the mask, forward and backward."""

import pytest
import torch

from longctx.attention import Attention, Mask, attention, check
from longctx.attention.naive import visible
from tests.attention.rule import DEVICE, ON_GPU, Case, inputs

SOFTCAP = 2.5  # scores reach 3 times as much
CASES = [
    Case(2, 37, 37, Hq=4, Hkv=2, D=16, mask="documents"),
    Case(1, 33, 49, Hq=2, Hkv=1, D=24, window=9),
    Case(1, 40, 40, Hq=2, D=16, mask="intervals"),
]
CHOICES = [
    "naive",
    pytest.param("tiled", marks=pytest.mark.no_gpu),
    "portable",
    pytest.param("flex", marks=pytest.mark.gpu),
]


def formula(q, k, v, mask, weights):
    """The plain formula in fp64: out, lse, dq, dk, dv."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    wide = [x.repeat_interleave(group, dim=2) for x in (k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", q, wide[0]) * q.shape[3] ** -0.5
    scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
    seen = visible(mask.bind(q.shape[0], q.shape[1], k.shape[1], q.device), k.shape[1])
    # a query that sees nothing has output 0 and lse -inf
    blind = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & ~blind, float("-inf"))
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1) * seen, wide[1])
    lse = scores.logsumexp(-1).masked_fill(blind[..., 0], float("-inf"))
    return differentiated(out, lse, (q, k, v), weights)


def differentiated(out, lse, leaves, weights):
    total = (out * weights[0]).sum() + (lse.nan_to_num(neginf=0.0) * weights[1]).sum()
    return [out, lse, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_softcap_is_the_formula(case, choice, monkeypatch):
    if choice == "portable" and not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend, options = choice, {}
    if choice in ("tiled", "portable"):
        backend, options = "flash", {"kernel": "portable"}
    q, k, v, do = inputs(case, torch.float32)
    q = 3 * q
    mask = case.build_mask()
    weights = do, torch.randn(case.B, case.Hq, case.Tq, device=DEVICE)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, mask, backend, return_lse=True, softcap=SOFTCAP, **options)
    actual = differentiated(out, lse, leaves, weights)
    expected = formula(q, k, v, mask, weights)
    # FlexAttention multiplies fp32 in TF32
    close = 5e-3 if choice == "flex" else 3e-5
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=close, rtol=close)


@pytest.mark.parametrize("backend", ["naive", "flash"])
def test_a_layer_has_the_gradients_of_autograd(backend):
    attend = Attention(backend, {"kernel": "portable"} if backend == "flash" else {}, None, SOFTCAP)
    q, k, v, do = inputs(CASES[0], torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attend.with_lse(*leaves, Mask.causal())
    expected = torch.autograd.grad(out, leaves, do)
    detached = [x.detach() for x in (*leaves, out, lse)]
    torch.testing.assert_close(attend.backward(do, *detached, Mask.causal()), expected)


@pytest.mark.parametrize("backend", ["sdpa", "flash_attn"])
def test_backends_without_softcap_name_others(backend):
    q = torch.zeros(1, 4, 1, 64)
    with pytest.raises(ValueError, match="use attention=flash, flex or naive"):
        attention(q, q, q, backend=backend, softcap=30.0)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("options", [{}, {"kernel": "hopper"}])
def test_hoppers_kernels_refuse_softcap(options):
    q = torch.zeros(1, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"attention\.options\.kernel=portable"):
        attention(q, q, q, softcap=30.0, **options)
    attention(q, q, q, softcap=30.0, kernel="portable")
    check("flash", device="cuda", dtype=q.dtype, head_dim=64)


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("inf")])
def test_softcap_is_a_finite_positive_number(softcap):
    q = torch.zeros(1, 4, 1, 16)
    with pytest.raises(ValueError, match="softcap="):
        attention(q, q, q, softcap=softcap)
