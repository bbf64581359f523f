"""flash on a GPU: what only real hardware can show. 2³¹ elements, graphs, streams of lengths."""

import random

import pytest
import torch

from longctx.attention import Mask, attention, kernels_run, registry
from longctx.kernels.attention import flash_op, portable
from tests.attention.rule import Case, check, inputs

pytestmark = pytest.mark.gpu


KERNELS = ["portable", "ampere", pytest.param("hopper", marks=pytest.mark.hopper)]


@pytest.fixture(params=KERNELS, autouse=True)
def kernel(request, monkeypatch):
    if request.param == "portable":
        monkeypatch.setattr(flash_op, "runs", lambda *_: False)
    if request.param == "ampere":  # as if the GPU were one
        monkeypatch.setattr(flash_op, "_major", lambda device: 8 if device.type == "cuda" else 0)
    yield request.param
    assert kernels_run()["flash"] == f"triton-{request.param}"


def compiled(kernel):
    """How many kernels Triton has compiled for this process."""
    from longctx.kernels.attention import ampere, hopper_backward, hopper_forward

    kernels = {
        "portable": [portable.forward_kernel, portable.dkv_kernel, portable.dq_kernel],
        "ampere": [ampere.forward_kernel, ampere.backward_kernel, ampere.sort_kernel],
        "hopper": [
            *(hopper_forward.forward_kernel, hopper_backward.backward_kernel),
            hopper_backward.unpack_kernel,
        ],
    }[kernel]
    caches = (x for y in (portable.delta_kernel, *kernels) for x in y.device_caches.values())
    return sum(len(cache[0]) for cache in caches)


def same(x, y, name, kernel):
    """The same bits, or nearly, where dq is added up in any order."""
    is_exact = name != "dq" or kernel == "portable"
    return torch.equal(x, y) if is_exact else torch.allclose(x, y, atol=1e-2)


def test_offsets_beyond_two_to_the_31():
    """The last rows of tensors of over 2³¹ elements are those of naive attention on them alone."""
    T, H, D, W = (1 << 20) + 4096 + 77, 16, 128, 64
    shape = 1, T, H, D
    q, k, v = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    assert q.numel() > 1 << 31
    out = attention(q, k, v, mask=Mask.causal(W))
    do = torch.zeros_like(out)
    do[:, -300:] = torch.randn_like(do[:, -300:])
    grads = torch.autograd.grad(out, (q, k, v), do)
    tail = [x[:, -300 - W :].detach().double().requires_grad_() for x in (q, k, v)]
    expected = attention(*tail, mask=Mask.causal(W), backend="naive")
    torch.testing.assert_close(out[:, -300:].double(), expected[:, -300:], atol=2e-2, rtol=2e-2)
    wanted = torch.autograd.grad(expected, tail, do[:, -300 - W :].double())
    for x, y in zip(grads, wanted, strict=True):
        torch.testing.assert_close(x[:, -300:].double(), y[:, -300:], atol=6e-2, rtol=6e-2)
        assert not x[:, : -300 - W].any()


@pytest.mark.parametrize("T", [100, 1000])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_keys_past_the_end_weigh_nothing(mask, T):
    """Where all scores are small, exp(0 - lse) of a key that is not there is infinite."""
    case = Case(1, T, T, D=64, mask=mask)
    q, k, v, do = inputs(case, torch.bfloat16)
    check(case, "flash", torch.bfloat16, tensors=[q / 10 + 4, k / 10 - 4, v, do])


@pytest.mark.parametrize("kernel", ["portable"], indirect=True)
def test_pointer_path_beyond_two_to_the_31(kernel, monkeypatch):
    monkeypatch.setattr(portable, "_use_tma", lambda q: False)
    test_offsets_beyond_two_to_the_31()


def test_a_thousand_lengths_compile_few_kernels(kernel):
    random.seed(0)
    check(Case(1, 100, 100, D=64), "flash", torch.bfloat16)

    def step():
        shapes = [(1, random.randint(1, 3000), 2, 64) for _ in "qk"]
        q, k = (torch.randn(x, device="cuda").bfloat16().requires_grad_() for x in shapes)
        attention(q, k, k).sum().backward()
        torch.cuda.synchronize()

    before = compiled(kernel)
    for _ in range(100):
        step()
    registry._plain_mask.cache_clear()
    held = torch.cuda.memory_allocated()
    for _ in range(900):
        step()
    registry._plain_mask.cache_clear()
    assert compiled(kernel) - before <= 4
    assert torch.cuda.memory_allocated() <= held


def test_graph_capture_and_replay(kernel):
    q, k, v, do = (x.requires_grad_() for x in inputs(Case(1, 200, 200, D=64), torch.bfloat16))
    mask = Mask.causal().bind(1, 200, 200, "cuda")

    def step():
        out = attention(q, k, v, mask=mask)
        return (out, *torch.autograd.grad(out, (q, k, v), do))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for name, x, y in zip(("out", "dq", "dk", "dv"), captured, step(), strict=True):
        assert same(x, y, name, kernel), name


@pytest.mark.parametrize("kernel", ["portable"], indirect=True)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rule_without_tensor_maps(head_dim, kernel, monkeypatch):
    """Pointer loads and the table of other chips, which no Hopper run takes by itself."""
    from longctx.kernels.attention import launch

    monkeypatch.setattr(portable, "_use_tma", lambda q: False)
    monkeypatch.setattr(launch, "architecture", lambda *_: "any")
    for mask in ("causal", "documents"):
        check(Case(1, 799, 799, Hq=4, Hkv=2, D=head_dim, mask=mask), "flash", torch.bfloat16)
