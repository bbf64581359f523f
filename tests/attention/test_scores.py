"""Changed scores against a plain formula in fp64: learnable sinks, and softcap.

A sink is a column of logits without values, as in gpt-oss. softcap makes scores c · tanh(s / c)
before the mask, as in Gemma 2.
"""

import pytest
import torch

from longctx.attention import Backend, Mask, attention, check
from longctx.attention.naive import visible
from tests.attention.rule import DEVICE, ON_GPU, Case, inputs

SIZES = {"Hq": 4, "Hkv": 2, "D": 16}
CASES = [
    *(("sinks", Case(2, 20, 20, **SIZES, window=window)) for window in (None, 5)),
    *(("sinks", Case(2, 20, 20, **SIZES, mask=mask)) for mask in ("full", "documents")),
    ("softcap", Case(2, 37, 37, **SIZES, mask="documents")),
    ("softcap", Case(1, 33, 49, Hq=2, Hkv=1, D=24, window=9)),
    ("softcap", Case(1, 40, 40, Hq=2, D=16, mask="intervals")),
]


def formula(q, k, v, mask, sinks=None, softcap=None):
    """Return out and lse in fp64; a blind query has output 0, and lse -inf or its sink."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(mask.bind(q.shape[0], q.shape[1], k.shape[1], q.device), k.shape[1])
    blind = ~seen.any(-1, keepdim=True)
    # finite where a softmax without a sink would be NaN
    scores = scores.masked_fill(~seen & ~(blind & (sinks is None)), float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    p = scores.softmax(-1)[..., : seen.shape[-1]] * seen
    lse = scores.logsumexp(-1)
    lse = lse if sinks is not None else lse.masked_fill(blind[..., 0], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def differentiated(tensors, weights, attend):
    """Return out, lse, and the gradients of their weighted sum, in fp64."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attend(*leaves)
    total = (out * weights[0]).sum() + (lse.nan_to_num(neginf=0.0) * weights[1]).sum()
    return [x.double() for x in (out, lse, *torch.autograd.grad(total, leaves))]


@pytest.mark.parametrize(("part", "case"), CASES, ids=str)
@pytest.mark.parametrize(
    "choice",
    [
        *("naive", pytest.param("tiled", marks=pytest.mark.no_gpu), "portable"),
        pytest.param("flex", marks=pytest.mark.gpu),
    ],
)
def test_changed_scores_are_the_formula(part, case, choice, monkeypatch):
    if choice == "portable" and not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend, options = choice, {}
    if choice in ("tiled", "portable"):
        backend, options = "flash", {"kernel": "portable"}
    *qkv, do = inputs(case, torch.float32)
    tensors, softcap = [3 * qkv[0], *qkv[1:]], 2.5  # scores reach 3 times as much
    if part == "sinks":
        tensors, softcap = [*tensors, sinks_of()], None
    generator, mask = torch.Generator().manual_seed(0), case.build_mask().to(DEVICE)
    weights = do, torch.randn(case.B, case.Hq, case.Tq, generator=generator).to(DEVICE)

    def attend(q, k, v, sinks=None):
        changed = {"sinks": sinks, "softcap": softcap}
        return attention(q, k, v, mask, backend, return_lse=True, **changed, **options)

    found = differentiated(tensors, weights, attend)
    wanted = differentiated(
        *([x.double() for x in tensors], weights),
        lambda q, k, v, sinks=None: formula(q, k, v, mask, sinks, softcap),
    )
    # FlexAttention multiplies fp32 in TF32
    close = 5e-3 if choice == "flex" else 3e-5
    torch.testing.assert_close(found, wanted, atol=close, rtol=close)


@pytest.fixture(params=["naive", "flash"])
def backend(request):
    return request.param


def sinks_of(heads=4):
    return (torch.randn(heads, generator=torch.Generator().manual_seed(1)) * 2).to(DEVICE)


def test_blind_queries_have_their_sink_and_no_gradient(backend):
    q, k, v, _ = (x.requires_grad_() for x in inputs(Case(2, 9, 4, 4, 2, 16), torch.float32))
    sinks = sinks_of().requires_grad_()
    out, lse = attention(q, k, v, Mask.causal(), backend, return_lse=True, sinks=sinks)
    assert (out[:, :5] == 0).all()
    torch.testing.assert_close(lse[:, :, :5], sinks[:, None].expand(2, 4, 5))
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, sinks))
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][:, :5] == 0).all() and gradients[3].abs().min() > 0


def test_a_sink_of_minus_infinity_is_none(backend):
    q, k, v, _ = inputs(Case(2, 9, 4, 4, 2, 16), torch.float32)
    none = torch.full((4,), float("-inf"), device=DEVICE, requires_grad=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, Mask.causal(), backend, return_lse=True, sinks=none)
    assert torch.equal(out, attention(*leaves, Mask.causal(), backend))
    assert (lse[:, :, :5] == float("-inf")).all()
    gradients = torch.autograd.grad(out.sum() + lse[:, :, 5:].sum(), (*leaves, none))
    assert all(g.isfinite().all() for g in gradients)


def test_sinks_train_only_with_a_differentiable_lse():
    q, k, v, _ = inputs(Case(2, 37, 37, 4, 2, 16), torch.float32)
    sinks = sinks_of().requires_grad_()
    with pytest.raises(ValueError, match="with which sinks are trained"):
        attention(q, k, v, backend="sdpa", sinks=sinks)
    if not ON_GPU:
        with torch.no_grad():
            out = attention(q, k, v, backend="sdpa", sinks=sinks)
        expected = formula(q, k, v, Mask.causal(), sinks.detach())[0]
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    assert "sinks" not in Backend.description.scores


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("options", [{}, {"kernel": "hopper"}])
def test_hoppers_kernels_refuse_softcap(options):
    q = torch.zeros(1, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"attention\.options\.kernel=portable"):
        attention(q, q, q, softcap=30.0, **options)
    attention(q, q, q, softcap=30.0, kernel="portable")
    check("flash", device="cuda", dtype=q.dtype, head_dim=64)
