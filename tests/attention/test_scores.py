"""Changed scores against a plain formula in fp64: learnable sinks, softcap, and biases of keys.

A sink is a column of logits without values, as in gpt-oss. softcap makes scores c · tanh(s / c)
before the mask, as in Gemma 2.
"""

from dataclasses import replace

import pytest
import torch

from longctx.attention import Attention, Backend, Mask, Scores, attention, flash
from longctx.attention.naive import visible
from longctx.kernels.attention.key_bias import first_keys
from tests.attention.rule import DEVICE, ON_GPU, Case, inputs

SIZES = {"Hq": 4, "Hkv": 2, "D": 16}
CASES = [
    *(("sinks", Case(2, 20, 20, **SIZES, window=window)) for window in (None, 5)),
    *(("sinks", Case(2, 20, 20, **SIZES, mask=mask)) for mask in ("full", "documents")),
    ("softcap", Case(2, 37, 37, **SIZES, mask="documents")),
    ("softcap", Case(1, 33, 49, Hq=2, Hkv=1, D=24, window=9)),
    ("softcap", Case(1, 40, 40, Hq=2, D=16, mask="intervals")),
    ("key bias", Case(2, 37, 37, **SIZES)),
    ("key bias", Case(1, 33, 49, **SIZES, window=9)),
    ("key bias", Case(2, 40, 31, **SIZES, mask="full")),
    ("key bias, sinks", Case(2, 49, 33, **SIZES)),
    ("key bias, sinks, softcap", Case(2, 37, 37, **SIZES, mask="documents")),
    ("key bias, sinks, softcap", Case(1, 40, 40, Hq=2, D=16, mask="intervals")),
]


def formula(q, k, v, mask, sinks=None, softcap=None, key_bias=None):
    """Return out and lse in fp64; a blind query has output 0, and lse -inf or its sink."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if key_bias is not None:
        scores = scores + key_bias.double()[:, :, None]
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
    tensors = [3 * qkv[0], *qkv[1:]]  # scores reach 3 times as much
    softcap = 2.5 if "softcap" in part else None
    learned = {"sinks": sinks_of(case.Hq), "key_bias": bias_of(case)}
    learned = {name: x for name, x in learned.items() if name.replace("_", " ") in part}
    tensors += learned.values()
    generator, mask = torch.Generator().manual_seed(0), case.build_mask().to(DEVICE)
    weights = do, torch.randn(case.B, case.Hq, case.Tq, generator=generator).to(DEVICE)

    def changed(leaves):
        return {"softcap": softcap, **dict(zip(learned, leaves, strict=True))}

    def attend(q, k, v, *leaves):
        given = {**changed(leaves), **options}
        return attention(q, k, v, mask, backend, return_lse=True, **given)

    found = differentiated(tensors, weights, attend)
    wanted = differentiated(
        *([x.double() for x in tensors], weights),
        lambda q, k, v, *leaves: formula(q, k, v, mask, **changed(leaves)),
    )
    # FlexAttention multiplies fp32 in TF32
    close = 5e-3 if choice == "flex" else 3e-5
    torch.testing.assert_close(found, wanted, atol=close, rtol=close)


@pytest.fixture(params=["naive", "flash"])
def backend(request):
    return request.param


def sinks_of(heads=4):
    """A column: kernels read a number after the other."""
    return (2 * torch.randn(heads, 2, generator=torch.Generator().manual_seed(1))).to(DEVICE)[:, 0]


def bias_of(case):
    """Return a bias for all sequences, which rises and falls."""
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(1, case.Hq, case.Tk, generator=generator) * 2.0).to(DEVICE)


@pytest.mark.parametrize("kernel", ["portable", pytest.param("ampere", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_a_large_bias_loses_no_digits(kernel, mask):
    """What is constant along a row cancels, bit by bit."""
    case = Case(2, 300, 300, 4, 2, 64, mask)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    tensors = inputs(case, dtype)
    bias = torch.arange(300.0, device=DEVICE).mul(0.125).expand(1, 4, -1)
    found = []
    for constant in (0.0, 2.0**20):
        leaves = [x.clone().requires_grad_() for x in (*tensors[:3], bias + constant)]
        out = attention(*leaves[:3], case.build_mask(), kernel=kernel, key_bias=leaves[3])
        found.append((out, *torch.autograd.grad(out, leaves, tensors[3])))
    # the kernels for mma.sync add dq up in any order
    names = ("out", "dq", "dk", "dv", "dkey_bias")
    for name, x, y in zip(names, *found, strict=True):
        if kernel == "portable" or name != "dq":
            assert torch.equal(x, y), name


@pytest.mark.parametrize("changed", [{}, {"sinks": True, "softcap": 3.0}], ids=["plain", "all"])
@pytest.mark.parametrize(
    "case", [Case(1, 700, 700, 4, 2, 16), Case(2, 500, 500, 4, 4, 16)], ids=str
)
@pytest.mark.parametrize(("mask", "window"), [("causal", 200), ("documents", None), ("full", None)])
def test_pruned_keys_weigh_nothing(case, mask, window, changed, monkeypatch):
    """Heads that forget fast skip keys of each document, and nothing changes but the last bits."""
    case = replace(case, mask=mask, window=window)
    *qkv, do = inputs(case, torch.float32)
    generator = torch.Generator().manual_seed(3)
    gates = torch.rand(case.B, 4, case.Tk, generator=generator).to(DEVICE)
    bias = (gates * torch.tensor([0.01, 0.5, 1.0, 4.0], device=DEVICE)[:, None]).cumsum(2)
    bound = case.build_mask().bind(case.B, case.Tq, case.Tk, DEVICE)
    if mask == "documents":
        bias = bias - bias.gather(2, bound.first.long()[:, None].expand_as(bias))
    tensors = [qkv[0] / 2, qkv[1] / 2, qkv[2], bias]
    found, starts = [], []

    def spied(*args):
        starts.append(first_keys(*args))
        return starts[0]

    monkeypatch.setattr(flash, "first_keys", spied)
    for prune in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        given = changed | {"key_bias": leaves[3], "kernel": "portable", "prune": prune}
        if "sinks" in changed:
            given["sinks"] = bias[0, :, case.Tk // 3].clone().requires_grad_()
            leaves.append(given["sinks"])
        out, lse = attention(*leaves[:3], case.build_mask(), return_lse=True, **given)
        found.append([out, lse, *torch.autograd.grad((out * do).sum() + lse.sum(), leaves)])
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=2e-5)
    skipped = (starts[0] - bound.first[:, None]).float().mean((0, 2))
    assert skipped[3] > 20 and skipped[0] < skipped[3] / 2
    assert (starts[0].diff(dim=2) >= 0).all()
    if not changed:
        k = tensors[1].repeat_interleave(case.Hq // case.Hkv, dim=2).double()
        scores = torch.einsum("bihd,bjhd->bhij", tensors[0].double(), k) / 4 + bias[:, :, None]
        p = scores.masked_fill(~visible(bound, case.Tk), float("-inf")).softmax(-1)
        before = torch.arange(case.Tk, device=DEVICE) < starts[0][..., None]
        assert (p * before).nansum(-1).max() < 2.0**-24


def test_pruning_keeps_nan_in_its_document():
    case = Case(2, 90, 90, 2, 2, 16, "documents")
    q, k, v, _ = inputs(case, torch.float32)
    k[0, 5], q[1, 7] = float("nan"), float("inf")
    bias = torch.arange(90.0, device=DEVICE).expand(1, 2, -1)
    given = {"key_bias": bias, "kernel": "portable"}
    plain, pruned = (attention(q, k, v, case.build_mask(), **given, prune=x) for x in (False, True))
    assert plain[0, -1].isfinite().all() and plain[0, 5].isnan().all()
    torch.testing.assert_close(pruned, plain, equal_nan=True)


def test_pruning_keeps_what_fp16_cannot_hold():
    q = torch.full((1, 16, 1, 16), 400.0, dtype=torch.float16, device=DEVICE)
    v = torch.ones_like(q)
    given = {"scale": 1e-3, "key_bias": torch.zeros(1, 1, 16, device=DEVICE)}
    assert (attention(q, q, v, prune=True, **given) == 1).all()


def test_a_forgotten_key_that_all_queries_point_to_is_kept():
    """Random keys never come near the bound of a product."""
    q, v = torch.eye(16, device=DEVICE)[:1].expand(1, 64, 1, 16), torch.zeros(1, 64, 1, 16)
    k, v = 36 * q * (torch.arange(64, device=DEVICE) == 0)[:, None, None], v.to(DEVICE)
    v[:, 0] = 1
    given = {"scale": 1.0, "key_bias": torch.arange(64.0, device=DEVICE)[None, None] / 2}
    out = attention(q, k, v, prune=True, **given)
    assert out[0, -1].min() > 0.9  # e^36 of the first key to e^31.5 of the last


def test_alibi_is_a_bias_of_distances():
    """slope · j is ALiBi's -slope · (i - j) but for a constant of the row."""
    q, k, v, _ = inputs(Case(1, 70, 70, 4, 4, 16), torch.float32)
    slopes = 2.0 ** -torch.arange(1.0, 5.0, device=DEVICE)
    i = torch.arange(70.0, device=DEVICE)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4 - slopes[:, None, None] * (i[:, None] - i)
    scores = scores.masked_fill(i[:, None] < i, float("-inf"))
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    out = attention(q, k, v, key_bias=(slopes[:, None] * i)[None])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_key_bias_of_another_form_is_refused():
    q, k, v, _ = inputs(Case(2, 5, 9, 4, 2, 16), torch.float32)
    bias = torch.zeros(2, 4, 9, device=DEVICE)
    for wrong in (bias[:, :2], bias[..., :5], bias[0], bias.bfloat16()):
        with pytest.raises(ValueError, match="key_bias must be"):
            attention(q, k, v, key_bias=wrong)
    with pytest.raises(ValueError, match="it has no key bias; use attention=flash"):
        attention(q, k, v, backend="sdpa", key_bias=bias)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_backward_of_saved_sums_has_the_gradient_of_the_bias(backend, has_sinks):
    """As recomputation calls it, with the lse of the kernels."""
    q, k, v, do = inputs(Case(2, 33, 33, 4, 2, 16), torch.float32)
    scores = Scores(None, None, sinks_of() if has_sinks else None, bias_of(Case(2, 33, 33, 4)))
    scores = scores._replace(key_bias=scores.key_bias.expand(2, -1, -1))
    mask, call = Mask.causal().bind(2, 33, 33, DEVICE), Attention(backend)
    with torch.no_grad():
        out, lse = call.with_lse(q, k, v, mask, scores)
        found = call.backward(do, (q, k, v, out, lse), mask, scores)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *scores[2:]) if x is not None]
    sinks = leaves[3] if has_sinks else None
    expected = attention(*leaves[:3], mask, "naive", sinks=sinks, key_bias=leaves[-1])
    wanted = torch.autograd.grad(expected, leaves, do)
    found = [x for x in found if x is not None]
    torch.testing.assert_close(found, list(wanted), atol=1e-5, rtol=1e-5)


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
    assert attention(*leaves, Mask.causal(), backend, sinks=none / none)[:, 5:].isnan().all()
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
    # a slice would be copied in backward
    assert Scores(sinks=sinks).of_heads(0, 4).sinks is sinks
    assert "sinks" not in Backend.description.scores
