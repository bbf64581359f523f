"""AdamW's kernel against torch's AdamW in fp64; in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor

from longctx.kernels.elementwise.adamw_update import adamw_, rates_of
from tests.inputs import DEVICE, inputs

pytestmark = pytest.mark.usefixtures("interpreter")
BETAS, EPS = (0.9, 0.95), 1e-8
SETTINGS = {"lr": 1e-2, "betas": BETAS, "eps": EPS, "weight_decay": 0.1}


def rates(step: int, lr: float = 1e-2, weight_decay: float = 0.1) -> Tensor:
    return torch.tensor(rates_of(step, lr, BETAS, weight_decay), device=DEVICE)


@pytest.mark.parametrize("n", [1, 7, 1023, 1024, 2049])
@pytest.mark.parametrize("factor", [None, 0.25])
@pytest.mark.parametrize("average", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_torch(n, factor, average):
    p = inputs(n)
    m, v = (torch.zeros(n, dtype=average, device=DEVICE) for _ in range(2))
    want = torch.nn.Parameter(p.double())
    reference = torch.optim.AdamW([want], **SETTINGS)  # type: ignore[arg-type]
    for step in range(1, 6):
        grad = inputs(n, seed=step) * 10.0 ** (step - 3)
        before = grad.clone()
        want.grad = grad.double() * (1.0 if factor is None else factor)
        reference.step()
        scalar = None if factor is None else torch.tensor(factor, device=DEVICE)
        adamw_(p, grad, m, v, scalar, rates(step), BETAS, EPS)
        assert torch.equal(grad, before)  # clipped on the way, not in memory
    error = (p.double() - want.detach()).abs().max()
    assert error < (1e-6 if average == torch.float32 else 5e-3)
    assert m.dtype == v.dtype == average


def test_it_writes_nothing_past_the_end():
    places = [inputs(2000, seed=seed).abs() for seed in range(4)]
    before = [x.clone() for x in places]
    adamw_(*(x[:1500] for x in places), None, rates(1), BETAS, EPS)
    assert all(torch.equal(x[1500:], y[1500:]) for x, y in zip(places, before, strict=True))
    assert not torch.equal(places[0][:1500], before[0][:1500])


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts():
    n = 2**31 + 5
    p, grad, m, v = (torch.zeros(n, dtype=torch.float32, device="cuda") for _ in range(4))
    grad[-3:] = torch.tensor([1.0, -2.0, 3.0], device="cuda")
    adamw_(p, grad, m, v, None, rates(1, 0.5, 0.0), BETAS, EPS)
    assert torch.allclose(p[-4:].cpu(), torch.tensor([0.0, -0.5, 0.5, -0.5]))
    assert int(torch.count_nonzero(p)) == 3
