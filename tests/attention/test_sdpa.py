"""sdpa beyond the correctness rule: which kernel runs, blind queries, memory."""

import pytest
import torch

from longctx.attention import Mask, attention, kernels_run
from longctx.config.fields import KEYS
from tests.attention.rule import DEVICE, ON_GPU, Case, check
from tests.live_memory import LiveMemory


@pytest.mark.no_gpu
@pytest.mark.parametrize("blind", [70, 130])
def test_queries_that_see_nothing_on_a_cpu(blind):
    """Zero gradients also where no query of a tile sees a key, and no NaN from such a query."""
    q, k, v = (torch.randn(1, 130, 2, 8) for _ in range(3))
    q[:, :blind] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    last = torch.arange(130)[None].masked_fill(torch.arange(130) < blind, -1)
    out, lse = attention(*leaves, Mask.intervals(last * 0, last), "sdpa", return_lse=True)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert not any(x.isnan().any() for x in (out, *gradients))
    assert not out[:, :blind].any()
    assert not gradients[0][:, :blind].any()
    assert torch.equal(lse[0, 0] == float("-inf"), torch.arange(130) < blind)


@pytest.mark.parametrize("backend", ["sdpa", "flash"])
def test_no_square_matrix_on_a_cpu(backend):
    sizes = []
    for T in (4096, 8192):
        x = torch.randn(1, T, 1, 8)
        with LiveMemory() as live:
            attention(x, x, x, mask=Mask.causal(64), backend=backend)
        sizes.append(live.peak)
    assert sizes[1] <= 2.1 * sizes[0]


@pytest.mark.gpu
def test_the_pinned_kernel_runs():
    x = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16)
    expected = {"auto": "cudnn", "flash": "flash-attention-2", "cudnn": "cudnn"}
    if torch.cuda.get_device_capability()[0] < 9:
        expected = {"auto": "flash-attention-2", "flash": "flash-attention-2"}
    for kernel, name in expected.items():
        attention(x, x, x, backend="sdpa", kernel=kernel)
        assert kernels_run()["sdpa"] == name
    attention(x[:, :200], x[:, :200], x[:, :200], backend="sdpa")
    assert kernels_run()["sdpa"] == "flash-attention-2"
    packed = Mask.documents(torch.arange(256)[None] // 100)
    attention(x, x, x, mask=packed, backend="sdpa")
    assert kernels_run()["sdpa"] == "flash-attention-2"
    with pytest.raises(ValueError, match="kernel=flash"):
        attention(x, x, x, mask=packed, backend="sdpa", kernel="cudnn")


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("kernel", ["auto", "cudnn"])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 256, 256, Hq=4, Hkv=2, D=64),
        Case(1, 384, 384, D=128, mask="full"),
        Case(1, 384, 384, Hq=4, Hkv=2, D=192),
        Case(1, 384, 384, D=256),
    ],
    ids=str,
)
def test_rule_for_cudnn(case, kernel):
    check(case, "sdpa", torch.bfloat16, kernel=kernel)
    assert kernels_run()["sdpa"] == "cudnn"


@pytest.mark.gpu
def test_the_same_bits_where_torch_is_deterministic():
    x = torch.randn(1, 1024, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    gradients = [
        torch.autograd.grad(attention(x, x, x, backend="sdpa").sum(), x)[0] for _ in range(20)
    ]
    assert kernels_run()["sdpa"] == "flash-attention-2"
    assert all(torch.equal(gradients[0], other) for other in gradients)
    if torch.cuda.get_device_capability()[0] >= 9:
        with pytest.raises(ValueError, match="deterministic=true rules out"):
            attention(x, x, x, backend="sdpa", kernel="cudnn")


@pytest.mark.parametrize(
    "mask",
    [Mask.causal(), Mask.causal(50), Mask.documents(torch.arange(256)[None] // 100)],
    ids=lambda m: m.kind,
)
def test_one_graph_under_compile(mask):
    """Also if nothing asked for the keys of a configuration before; sdpa is no graph on a CPU."""
    KEYS.clear()
    q = torch.randn(1, 256, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    bound, use = mask.bind(1, 256, 256, DEVICE), {"backend": "sdpa" if ON_GPU else "naive"}
    compiled = torch.compile(lambda q, mask: attention(q, q, q, mask, **use), fullgraph=True)
    (actual,) = torch.autograd.grad(compiled(q, bound).sum(), q)
    (expected,) = torch.autograd.grad(attention(q, q, q, bound, **use).sum(), q)
    torch.testing.assert_close(actual, expected, atol=1e-2, rtol=2e-2)
