"""The kernel's loss and gradient against fp64, at odd sizes, strides and extremes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.kernels.elementwise.cross_entropy import cross_entropy_, multiply_
from longctx.model.loss import linear_cross_entropy
from tests.inputs import DEVICE

pytestmark = pytest.mark.usefixtures("interpreter")


def exact(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the rows of z in fp64."""
    z = z.double().requires_grad_()
    loss = F.cross_entropy(z, target, reduction="none")
    return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]


def run(z: Tensor, target: Tensor, gradient: bool = True) -> Tensor:
    loss = torch.full(target.shape, float("nan"), device=z.device)
    cross_entropy_(z, target, loss, torch.ones((), device=z.device) if gradient else None)
    return loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "V"),
    [
        *((1, 2), (3, 127), (5, 128), (4, 129), (7, 1000)),
        *((2, 8192), (3, 8193), (2, 16384), (3, 16385), (2, 40013)),
    ],
)
def test_loss_and_gradient(n, V, dtype):
    generator = torch.Generator().manual_seed(V)
    wide = torch.randn(n, V + 3, generator=generator).mul(4).to(DEVICE, dtype)
    z, target = wide[:, :V], torch.randint(V, (n,), generator=generator).to(DEVICE)
    target[0] = V - 1
    beyond = wide[:, V:].clone()
    want_loss, want = exact(z, target)
    loss = run(z, target)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    torch.testing.assert_close(z.double(), want, rtol=rounding, atol=1e-6)
    assert torch.equal(wide[:, V:], beyond)


def test_logits_stay_without_gradient():
    z = torch.randn(3, 130, device=DEVICE)
    before, target = z.clone(), torch.tensor([5, -100, 129], device=DEVICE)
    loss = run(z, target, gradient=False)
    assert torch.equal(z, before)
    assert loss[1] == 0
    torch.testing.assert_close(loss, F.cross_entropy(before, target, reduction="none"))


HARD = [
    *(([2e38, -2e38, 0.0], 0), ([-math.inf, 1.0, 1.0], 1), ([-2e4] * 3, 2)),
    ([math.nan] * 300, -100),  # is not scored
    *(([-math.log(confidence), 0.0], 0) for confidence in (1e-1, 1e-3, 1e-4, 1e-8)),
]


@pytest.mark.parametrize(("row", "target"), HARD)
def test_hard_rows_are_exact(row, target):
    z, targets = torch.tensor([row], device=DEVICE), torch.tensor([target], device=DEVICE)
    want_loss, want = exact(z.nan_to_num(0.0, math.inf, -math.inf), targets)
    torch.testing.assert_close(run(z, targets).double(), want_loss, rtol=1e-5, atol=5e-8)
    torch.testing.assert_close(z.double(), want, rtol=2e-4, atol=5e-8)  # fp32 sums


@pytest.mark.parametrize("by", [1.0, -2.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_multiply_reaches_every_element(by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # every program has several blocks
    monkeypatch.setattr("longctx.kernels.elementwise.cross_entropy.MULTIPLIED", 4)
    x = torch.randn(9_001, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    want = x * by
    assert torch.equal(multiply_(x, torch.tensor(by, device=DEVICE)), want)


@pytest.mark.gpu
def test_bf16_gradients_are_as_near_fp32_as_untiled():
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(4096, 768, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(8192, 768, generator=generator, device="cuda").mul(0.06).bfloat16()
    both = [hidden.requires_grad_(), weight.requires_grad_()]
    targets = torch.randint(8192, (4096,), generator=generator, device="cuda")
    leaves = [x.detach().float().requires_grad_() for x in both]
    want = torch.autograd.grad(F.cross_entropy(leaves[0] @ leaves[1].t(), targets), leaves)
    loss = F.cross_entropy((hidden @ weight.t()).float(), targets)
    untiled = torch.autograd.grad(loss, both)
    ours = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 1024), both)
    for name, a, b, exact in zip(("dh", "dW"), ours, untiled, want, strict=True):
        ours_off, theirs_off = ((x.float() - exact).norm() / exact.norm() for x in (a, b))
        assert ours_off <= 1.02 * theirs_off, name


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements():
    n, V = 4200, 2**19 + 1  # 2.2e9 logits
    z = torch.zeros(n, V, dtype=torch.bfloat16, device="cuda")
    z[-1, -1] = 10
    target = torch.full((n,), V - 1, device="cuda")
    loss = run(z, target)
    assert loss[0].item() == pytest.approx(math.log(V), rel=1e-5)
    assert z[-1, -1].item() == pytest.approx(22026.47 / (22026.47 + V - 1) - 1, rel=1e-2)
    assert z[-1, 0].item() == pytest.approx(1 / (22026.47 + V - 1), rel=1e-2)
