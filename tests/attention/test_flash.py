"""flash against the correctness rule, and what must hold beyond it: exact isolation, no NaN, any
strides, compile, determinism.
"""

import pytest
import torch
from torch.autograd import forward_ad

from longctx.attention import Mask, attention, kernels_run, registry
from longctx.kernels.attention import flash_op, portable, tiled
from longctx.kernels.attention.flash_op import backward_op, forward_op
from longctx.kernels.attention.launch import Launch
from tests.attention.rule import (
    DEVICE,
    FREE,
    GRID,
    HEAD_SIZES,
    NAMES,
    ON_GPU,
    Case,
    check,
    inputs,
    run,
)

# Triton's interpreter has no bf16 products
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


IMPLEMENTATIONS = ["triton-portable"] if ON_GPU else ["triton-portable", "torch-tiled"]
# Of what torch makes of the operator, whatever computes it
any_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS[-1:], indirect=True)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    """Each implementation that can run here: real kernels, interpreted ones, and CPU tiles."""
    if not ON_GPU:
        monkeypatch.setattr(tiled, "ROWS", 16)
        monkeypatch.setattr(tiled, "COLS", 32)
        monkeypatch.setattr(portable, "L2_BYTES", 1 << 13)  # several groups of heads
        monkeypatch.setattr(portable, "launch_config", lambda *_: Launch(32, 16, 4, 1))
        if request.param == "triton-portable":
            monkeypatch.setenv("TRITON_INTERPRET", "1")
    # has a file of its own, test_flash_generations.py
    monkeypatch.setattr(flash_op, "runs", lambda *_: False)
    yield request.param
    assert kernels_run()["flash"] == request.param


OTHERS = GRID + FREE if ON_GPU else [Case(2, 65, 65, Hq=4, Hkv=2, mask="documents")]
RULE = [
    *((case, torch.float32) for case in GRID + FREE),
    *(pytest.param(x, dtype, marks=pytest.mark.slow) for x in OTHERS for dtype in DTYPES[1:]),
    *((case, dtype) for case in HEAD_SIZES for dtype in (DTYPES[1:] if ON_GPU else DTYPES[:1])),
]


@pytest.mark.parametrize(("case", "dtype"), RULE, ids=str)
def test_rule(case, dtype, implementation):
    check(case, "flash", dtype)


@pytest.mark.no_gpu
def test_bf16_is_refused_by_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    registry._caller.cache_clear()  # an earlier test's callers remember being served
    with pytest.raises(ValueError, match="interpreter"):
        attention(*(torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16),) * 3)


@pytest.mark.usefixtures("interpreter")
def test_shipped_tiles():
    """The tiles of the table, not the small ones that make other tests walk over many."""
    check(Case(1, 200, 200, mask="documents"), "flash", torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_tensor_map_loads(dtype, implementation, monkeypatch):
    """The path that Hopper takes, also in the interpreter."""
    has_maps = not ON_GPU or torch.cuda.get_device_capability()[0] >= 9
    monkeypatch.setattr(portable, "_use_tma", lambda q: has_maps)
    documents = Case(2, 41, 41, Hq=4, Hkv=2, mask="documents")
    for case in (documents, Case(2, 20, 41, window=9), FREE[0]):
        check(case, "flash", dtype)
    # one token per row: contiguous whatever its stride
    case = Case(3, 1, 1, Hq=4, Hkv=2)
    heads_first = [x.transpose(1, 2) for x in inputs(case, dtype)]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in heads_first]
    one = [x.transpose(1, 2) for x in copies]
    assert one[0].is_contiguous() and one[0].stride(1) != 4 * 32
    check(case, "flash", dtype, tensors=one)


@pytest.mark.parametrize(
    "poison", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)]
)
def test_nan_and_inf_stay_in_their_document(poison, implementation):
    """NaN and inf in a document's q, k, v and do show in it, and leave all others' bits alone."""
    inside, others = slice(20, 27), [*range(20), *range(27, 50)]
    mask = Mask.documents(torch.tensor([0] * 20 + [1] * 7 + [2] * 23)[None])
    tensors = inputs(Case(1, 50, 50, Hq=2, Hkv=1), torch.float32)
    before = run(tensors, mask, "flash", torch.float32)
    for x in tensors:
        x[:, inside] = poison
    after = run(tensors, mask, "flash", torch.float32)
    for name, x, y in zip(NAMES, before, after, strict=True):
        if name != "lse":
            assert torch.equal(x[:, others], y[:, others]), name
            assert y[:, inside].isnan().any(), f"{name} hides what is not finite"


@pytest.mark.usefixtures("interpreter")
def test_poison_in_keys_and_values_alone():
    """Inside one document too, and in keys that nothing sees, in the kernels of our own; torch's
    fused CPU kernel keeps documents apart, not tokens.
    """
    tensors = inputs(Case(1, 70, 70, 1, 1), torch.float32)
    is_late = torch.arange(70)[None] >= 40
    gap = Mask.intervals(torch.where(is_late, 33, 0), torch.where(is_late, 69, 29))
    for mask, bad in ((Mask.causal(), slice(50, 51)), (gap, slice(30, 33))):
        clean = run(tensors, mask, "flash", torch.float32)
        for poisoned in (1, 2):
            dirty = list(tensors)
            dirty[poisoned] = tensors[poisoned].clone()
            dirty[poisoned][0, bad, :, 3] = float("nan")
            found = run(dirty, mask, "flash", torch.float32)
            if mask is gap:
                assert all(map(torch.equal, found, clean))
            else:
                assert torch.equal(found[0][:, :50], clean[0][:, :50])
                assert found[0][:, 50:].isnan().any(-1).all(), "every query that sees it"


def test_gradient_of_the_lse(implementation):
    case = Case(1, 40, 40, Hq=4, Hkv=2, mask="documents")
    tensors = inputs(case, torch.float32)
    weight = torch.randn(1, 4, 40, device=DEVICE)
    grads = []
    for backend, dtype in (("naive", torch.float64), ("flash", torch.float32)):
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors[:3])
        out, lse = attention(q, k, v, mask=case.build_mask(), backend=backend, return_lse=True)
        loss = (out * tensors[3]).sum() + (lse * weight).sum()
        grads.append(torch.autograd.grad(loss, (q, k, v)))
    torch.testing.assert_close([x.float() for x in grads[0]], grads[1], atol=1e-4, rtol=1e-4)
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    only = attention(q, k, v, return_lse=True)[1]
    assert torch.autograd.grad(only.sum(), q)[0].abs().sum() > 0, "the lse alone"


@any_implementation
def test_operator_is_registered_properly(implementation):
    mask = Mask.causal().bind(1, 9, 9, DEVICE)
    q, k, v = (torch.randn(1, 9, h, 16, device=DEVICE, requires_grad=True) for h in (2, 1, 1))
    intervals = mask.first, mask.last, mask.qfirst, mask.qlast, "long"
    options = 0.25, None, implementation
    sinks = torch.zeros(2, device=DEVICE, requires_grad=True)
    bias = torch.zeros(1, 2, 9, device=DEVICE, requires_grad=True)
    for learned in ((None, None), (sinks, None), (None, bias), (sinks, bias)):
        others = *learned, *intervals, *options
        torch.library.opcheck(forward_op, (q, k, v, *learned, *intervals, mask.first, *options))
        changed = dict(zip(("sinks", "key_bias"), learned, strict=True))
        with torch.no_grad():
            out, lse = attention(q, k, v, mask, return_lse=True, scale=0.25, **changed)
            torch.library.opcheck(backward_op, (out, None, q, k, v, out, lse, *others))


@any_implementation
def test_other_derivatives_are_refused(implementation):
    q = torch.randn(1, 8, 2, 16, device=DEVICE, requires_grad=True)
    (first,) = torch.autograd.grad(attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.sum().backward()
    q = q.detach()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        attention(forward_ad.make_dual(q, q), q, q)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: attention(x, q, q), (q,), (q,))
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: attention(x, q, q).sum())(q)


@any_implementation
def test_one_graph_under_compile(implementation):
    q, k, v, do = inputs(Case(1, 64, 64), torch.float32)
    mask = Mask.documents(torch.arange(64)[None] // 20).bind(1, 64, 64, DEVICE)
    compiler = "inductor" if ON_GPU else "aot_eager"
    compiled = torch.compile(attention, backend=compiler, fullgraph=True)
    q.requires_grad_()
    bias = torch.arange(64.0, device=DEVICE).expand(1, 2, -1).clone().requires_grad_()
    for changed in ({}, {"key_bias": bias}):
        leaves = q, *changed.values()
        actual = torch.autograd.grad(compiled(q, k, v, mask, **changed), leaves, do)
        expected = torch.autograd.grad(attention(q, k, v, mask, **changed), leaves, do)
        assert all(map(torch.equal, actual, expected))
    assert kernels_run()["flash"] == implementation
