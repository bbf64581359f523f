"""The eight-bit copies of a matrix against torch's own rounding; in Triton's interpreter, or on a
GPU.

The interpreter rounds some halves wrongly, so without a GPU the inputs are numbers that FP8
can hold, times a power of two.
"""

import pytest
import torch
from torch import Tensor

from longctx.kernels.elementwise.quantize import TILE, padded, quantize
from tests.inputs import DEVICE

pytestmark = pytest.mark.usefixtures("interpreter")
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


def formula(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The copy and its scale."""
    most = torch.finfo(dtype).max
    amax = x.float().abs().amax().clamp(min=1e-30)
    scale = amax / torch.full_like(amax, most)  # on a GPU amax / most multiplies by 1 / most
    return (x.float() * (1 / scale)).clamp(-most, most).to(dtype), scale


def exact(shape: tuple[int, int], dtype: torch.dtype, power: int) -> Tensor:
    """Random numbers of the format times a power of two, the largest among them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    which = torch.randint(len(numbers), shape, generator=torch.Generator().manual_seed(power))
    x = numbers[which]
    x[-1, -1] = -torch.finfo(dtype).max
    return x * 2.0**power


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("R", "C"), [(1, 1), (3, 5), (65, 129), (48, 304)])
def test_both_copies_are_torchs_to_the_bit(R, C, dtype):
    for power, of in ((-60, torch.float32), (3, torch.bfloat16), (0, torch.float16)):
        inputs = [exact((R, C), dtype, power)]
        if DEVICE == "cuda":
            inputs.append(torch.randn(R, C) * torch.randn(R, C).mul(2).exp())
        for values in inputs:
            x = values.to(DEVICE, of)
            want, scale = formula(x, dtype)
            rows, columns, own = quantize(x, None, dtype, True, True)
            assert own == scale
            assert columns.shape == (C, padded(R)) and padded(R) % 16 == 0
            assert torch.equal(rows.view(torch.uint8), want.view(torch.uint8))
            assert torch.equal(columns[:, :R].view(torch.uint8), want.view(torch.uint8).t())
            assert not columns[:, R:].float().any()
            _, again, _ = quantize(x, own, dtype, False, True)
            assert torch.equal(again.view(torch.uint8), columns.view(torch.uint8))


def test_zeros_stay_zeros_and_nan_has_scale_nan():
    x = torch.zeros(3, 70, device=DEVICE)
    rows, _, scale = quantize(x, None, FORMATS[0], True, False)
    assert not rows.float().any() and scale.isfinite() and (1 / scale).isfinite()
    for value in (torch.inf, -torch.inf, torch.nan):
        x[2, 69] = value
        assert quantize(x, None, FORMATS[0], True, False)[2].isnan()


@pytest.mark.gpu
def test_rows_beyond_a_grids_second_axis():
    R = 65_535 * TILE[0] + 5
    x = torch.zeros(R, 16, dtype=torch.bfloat16, device="cuda")
    x[-3:] = 1.0
    rows, columns, _ = quantize(x, None, FORMATS[0], True, True)
    assert (rows[-3:].float() == 448).all() and (columns[:, R - 3 : R].float() == 448).all()
    assert int(rows.view(torch.uint8).count_nonzero()) == 48
    assert int(columns.view(torch.uint8).count_nonzero()) == 48
