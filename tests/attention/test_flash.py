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
from tests.attention.rule import DEVICE, FREE, GRID, HEAD_SIZES, ON_GPU, Case, check, inputs, run

# Triton's interpreter has no bf16 products
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


IMPLEMENTATIONS = ["triton-portable"] if ON_GPU else ["triton-portable", "torch-tiled"]
# Of what torch makes of the operator, whatever computes it
any_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS[-1:], indirect=True)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    """Each implementation that this machine can run: the real kernels, interpreted where there is
    no GPU, and CPU tiles.
    """
    if not ON_GPU:
        monkeypatch.setattr(tiled, "ROWS", 16)
        monkeypatch.setattr(tiled, "COLS", 32)
        monkeypatch.setattr(portable, "L2_BYTES", 1 << 13)  # several groups of heads
        monkeypatch.setattr(portable, "launch_config", lambda *_: Launch(32, 16, 4, 1))
        if request.param == "triton-portable":
            monkeypatch.setenv("TRITON_INTERPRET", "1")
    # has a file of its own, test_flash_hopper.py
    monkeypatch.setattr(flash_op, "runs", lambda *_: False)
    yield request.param
    assert kernels_run()["flash"] == request.param


@pytest.mark.parametrize("case", GRID + FREE, ids=str)
def test_rule(case, implementation):
    check(case, "flash")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case", GRID + FREE if ON_GPU else [Case(2, 65, 65, Hq=4, Hkv=2, mask="documents")], ids=str
)
def test_rule_in_every_dtype(case, dtype, implementation):
    check(case, "flash", dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:] if ON_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize("case", HEAD_SIZES, ids=str)
def test_every_head_size(case, dtype, implementation):
    check(case, "flash", dtype)


@pytest.mark.no_gpu
@pytest.mark.parametrize("mask", ["documents", "intervals"])
def test_bf16_on_a_cpu(mask):
    check(Case(2, 65, 65, Hq=4, Hkv=2, mask=mask), "flash", torch.bfloat16)


@pytest.mark.no_gpu
def test_bf16_is_refused_by_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    registry._caller.cache_clear()  # an earlier test's callers remember being served
    with pytest.raises(ValueError, match="interpreter"):
        attention(*(torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16),) * 3)


def test_shipped_tiles(monkeypatch):
    """The tiles of the table, not the small ones that make other tests walk over many."""
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    check(Case(1, 200, 200, mask="documents"), "flash", torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_tensor_map_loads(dtype, implementation, monkeypatch):
    """The path that Hopper takes, also in the interpreter."""
    monkeypatch.setattr(
        portable, "_use_tma", lambda q: not ON_GPU or torch.cuda.get_device_capability()[0] >= 9
    )
    for case in (
        Case(2, 41, 41, Hq=4, Hkv=2, mask="documents"),
        Case(2, 20, 41, window=9),
        FREE[0],
    ):
        check(case, "flash", dtype)
    case = Case(3, 1, 1, Hq=4, Hkv=2)
    heads_first = [
        torch.empty(3, x.shape[2], 1, 32, dtype=dtype, device=DEVICE) for x in inputs(case, dtype)
    ]
    one = [
        h.transpose(1, 2).copy_(x) for h, x in zip(heads_first, inputs(case, dtype), strict=True)
    ]
    assert one[0].is_contiguous() and one[0].stride(1) != 4 * 32, (
        "one token per row: contiguous whatever its stride"
    )
    check(case, "flash", dtype, tensors=one)


@pytest.mark.parametrize(
    "poison", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)]
)
def test_nan_and_inf_stay_in_their_document(poison, implementation):
    """NaN and inf in one document, q, k, v and do, leave every other document's bits alone, and
    show in its own.
    """
    inside, rest = slice(20, 27), [slice(0, 20), slice(27, 50)]
    mask = Mask.documents(torch.tensor([0] * 20 + [1] * 7 + [2] * 23)[None])
    tensors = inputs(Case(1, 50, 50, Hq=2, Hkv=1), torch.float32)
    before = run(tensors, mask, "flash", torch.float32)
    for x in tensors:
        x[:, inside] = poison
    after = run(tensors, mask, "flash", torch.float32)
    for name, x, y in zip(
        ("out", "dq", "dk", "dv"), before[:1] + before[2:], after[:1] + after[2:], strict=True
    ):
        for part in rest:
            assert torch.equal(x[:, part], y[:, part]), name
        assert y[:, inside].isnan().any(), f"{name} hides what is not finite"


def test_poison_in_keys_and_values_alone(monkeypatch):
    """Inside one document too, in the kernels of our own; torch's fused CPU kernel keeps documents
    apart, not tokens.
    """
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v, _ = inputs(Case(1, 70, 70), torch.float32)
    for x in (k, v):
        bad = x.clone()
        bad[0, 50, :, 3] = float("nan")
        out = attention(q, bad if x is k else k, bad if x is v else v)
        assert torch.equal(out[:, :50], attention(q, k, v)[:, :50])
        assert out[:, 50:].isnan().any(-1).all(), "every query that sees it"


def test_gradient_of_the_lse(implementation):
    case = Case(1, 40, 40, Hq=4, Hkv=2, mask="documents")
    tensors = inputs(case, torch.float32)
    weight = torch.randn(1, 4, 40, device=DEVICE)
    grads = []
    for backend, dtype in (("naive", torch.float64), ("flash", torch.float32)):
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors[:3])
        out, lse = attention(q, k, v, mask=case.build_mask(), backend=backend, return_lse=True)
        grads.append(
            torch.autograd.grad((out * tensors[3]).sum() + (lse * weight).sum(), (q, k, v))
        )
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x.float(), y, atol=1e-4, rtol=1e-4)
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    only = attention(q, k, v, return_lse=True)[1]
    assert torch.autograd.grad(only.sum(), q)[0].abs().sum() > 0, "the lse alone"


@any_implementation
def test_second_derivatives_are_refused(implementation):
    q = torch.randn(1, 8, 2, 16, device=DEVICE, requires_grad=True)
    (first,) = torch.autograd.grad(attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.sum().backward()


@any_implementation
def test_operator_is_registered_properly(implementation):
    mask = Mask.causal().bind(1, 9, 9, DEVICE)
    q, k, v = (torch.randn(1, 9, h, 16, device=DEVICE, requires_grad=True) for h in (2, 1, 1))
    intervals = mask.first, mask.last, mask.qfirst, mask.qlast
    options = 0.25, None, implementation
    torch.library.opcheck(forward_op, (q, k, v, *intervals, *options))
    with torch.no_grad():
        out, lse = attention(q, k, v, mask, return_lse=True, scale=0.25)
        torch.library.opcheck(backward_op, (out, None, q, k, v, out, lse, *intervals, *options))


def test_forward_mode_is_refused():
    q = torch.randn(1, 20, 1, 16, device=DEVICE)
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
    compiled = torch.compile(
        attention, backend="inductor" if ON_GPU else "aot_eager", fullgraph=True
    )
    q.requires_grad_()
    actual = torch.autograd.grad(compiled(q, k, v, mask), q, do)
    expected = torch.autograd.grad(attention(q, k, v, mask), q, do)
    assert torch.equal(actual[0], expected[0])
    assert kernels_run()["flash"] == implementation
