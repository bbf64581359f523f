"""Frozen weights of LoRA in few bits: lora.base=nf4 or fp8.

    y = x Wᵀ + b,   dx = dy W,   W = unpacked(weight)

A packed weight is a parameter of bytes. Each row has its codes and its scales, so rows are packed,
read, sharded and saved alone, and nothing casts them. W exists during its product only: backward
unpacks it again.

    nf4    W = c · a, c one of 16 quantiles of a normal distribution, a the largest of 64 weights
           (QLoRA, arXiv 2305.14314), by bitsandbytes' kernels. a is a byte too: low + step · level,
           with two fp32 numbers a row
    fp8    W = c · s, c in e4m3, s an fp32 number a row

On GPUs with scaled products of rows the forward pass of fp8 multiplies in FP8, x rounded to e4m3;
backward is in the precision of the run.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longctx.kernels import HAS_TRITON
from longctx.kernels import linear as plain_linear
from longctx.spec.parts import BASES, packed_width

if HAS_TRITON:
    from longctx.kernels import quantize

BLOCK = BASES["nf4"]  # weights of a scale
RANGE = 8  # bytes of two fp32 numbers
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
LEAST = 1e-30  # scale of a row of zeros


def is_packed(weight: Any) -> bool:
    """Return True for a packed weight."""
    return bool(weight.dtype == torch.uint8)


def is_fp8(weight: Tensor) -> bool:
    """Return True for a weight packed as fp8; the widths of nf4 are multiples of 16."""
    return weight.shape[1] % 16 == 8


def columns(width: int) -> int:
    """Return the weights in a row of `width` bytes."""
    return width - RANGE if width % 16 == 8 else (width - RANGE) // (BLOCK // 2 + 1) * BLOCK


def packed(values: Tensor, width: int) -> Tensor:
    """Return rows `values` (R, I) as `width` bytes each, which tell the format."""
    if width == packed_width("fp8", values.shape[1]):
        return packed_fp8(values)
    return packed_nf4(values)


def packed_fp8(values: Tensor) -> Tensor:
    """Return rows as bytes: codes, scale, and four zeros."""
    values = values.float()
    scale = values.abs().amax(dim=1, keepdim=True).clamp(min=LEAST) / LARGEST
    codes = (values / scale).clamp(-LARGEST, LARGEST).to(E4M3)
    rows = torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), dim=1)
    return F.pad(rows, (0, RANGE - scale.itemsize))


def packed_nf4(values: Tensor) -> Tensor:
    """Return rows as bytes: two codes a byte, levels of the scales, low and step, zeros."""
    functional = bitsandbytes()
    codes, state = functional.quantize_4bit(values.contiguous(), blocksize=BLOCK, quant_type="nf4")
    scales = state.absmax.view(len(values), -1)
    low, high = scales.aminmax(dim=1, keepdim=True)
    step = (high - low) / 255
    levels = ((scales - low) / step.clamp(min=LEAST)).round().to(torch.uint8)
    ends = torch.cat((low, step), dim=1).view(torch.uint8)
    rows = torch.cat((codes.view(len(values), -1), levels, ends), dim=1)
    return F.pad(rows, (0, -rows.shape[1] % 16))


@torch.library.custom_op("longctx::unpacked", mutates_args=())
def unpacked(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return W (O, I) of a packed weight."""
    if is_fp8(weight):
        codes, scale = parts_of_fp8(weight)
        w = torch.empty(codes.shape, dtype=dtype, device=weight.device)
        return torch.mul(codes.to(dtype), scale, out=w)  # multiplied in fp32
    I = columns(weight.shape[1])
    codes, levels, ends = weight[:, : I // 2 + I // BLOCK + RANGE].split(
        (I // 2, I // BLOCK, RANGE), dim=1
    )
    low, step = ends.contiguous().view(torch.float32).split(1, dim=1)
    functional = bitsandbytes()
    state = functional.QuantState(
        absmax=(low + step * levels).flatten(),
        shape=torch.Size((len(weight), I)),
        dtype=dtype,
        blocksize=BLOCK,
        quant_type="nf4",
    )
    w4: Tensor = functional.dequantize_4bit(codes.reshape(-1, 1), state)
    return w4


@unpacked.register_fake
def _(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.new_empty(len(weight), columns(weight.shape[1]), dtype=dtype)


def parts_of_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (O, I) and scale (O, 1) of a weight packed as fp8."""
    codes, scale = weight[:, :-RANGE], weight[:, -RANGE : -RANGE // 2]
    return codes.view(E4M3), scale.contiguous().view(torch.float32)


@torch.library.custom_op("longctx::packed_product", mutates_args=())
def packed_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ of x (N, I), in x's dtype."""
    if is_fp8(weight) and multiplies_fp8(x, len(weight)):
        x8, _, x_scale = quantize.quantize(x.contiguous(), None, E4M3, True, False)
        return scaled_product(x8, x_scale, weight, x.dtype)
    return F.linear(x, unpacked(weight, x.dtype))


@packed_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight))


def multiplies_fp8(x: Tensor, outputs: int) -> bool:
    """Return True if the GPU of x has scaled products of rows, with so many outputs."""
    is_right = x.is_cuda and x.dtype == torch.bfloat16 and outputs % 16 == 0 and HAS_TRITON
    return is_right and torch.cuda.get_device_capability(x.device) >= (9, 0)


def scaled_product(x8: Tensor, x_scale: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of x, x8 (N, I) in e4m3 times x_scale (), and a weight packed as fp8."""
    codes, scale = parts_of_fp8(weight)
    y: Tensor = torch._scaled_mm(
        x8,
        codes.contiguous().t(),
        scale_a=x_scale.expand(len(x8), 1).contiguous(),
        scale_b=scale.t().contiguous(),
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return packed_product(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return dy @ unpacked(weight, dy.dtype), None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b: x (..., I), weight (O, I) or packed, bias (O,)."""
    if not is_packed(weight):
        return plain_linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight)
    y = y.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias.to(y.dtype)


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight."""

    def __init__(self, frozen: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = frozen.in_features, frozen.out_features
        self.weight, self.bias = frozen.weight, frozen.bias
        self.product = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def parameter(weight: Tensor, base: str) -> nn.Parameter:
    """Return `weight` packed in the format `base`; one on "meta" holds nothing."""
    width = packed_width(base, weight.shape[1])
    if weight.is_meta:
        rows = weight.new_empty(len(weight), width, dtype=torch.uint8)
    else:
        rows = packed(weight.detach(), width)
    return nn.Parameter(rows, requires_grad=False)


def unpack(model: nn.Module, dtype: torch.dtype) -> None:
    """Put weights in `dtype` in the place of the packed ones of `model`."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and is_packed(weight):
            module.weight = nn.Parameter(unpacked(weight, dtype), requires_grad=False)


class UnpackedRows:
    """Unpack rows of a checkpoint's packed weight: x[first:last] has those alone, in fp32."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self.shape = torch.Size((weight.shape[0], columns(weight.shape[1])))

    def __getitem__(self, at: slice) -> Tensor:
        return unpacked(self.weight[at], torch.float32)


def bitsandbytes() -> Any:
    """Return bitsandbytes.functional; ValueError, one line, if it is not installed."""
    if "bitsandbytes" not in sys.modules:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError("lora.base=nf4: needs bitsandbytes: pip install bitsandbytes")
        # On some CPUs its import would download a kernel of the Hub and run it, and warn without
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        kernels = sys.modules.get("kernels")
        sys.modules["kernels"] = None  # type: ignore[assignment]
        importlib.import_module("bitsandbytes")
        del sys.modules["kernels"]
        if kernels is not None:
            sys.modules["kernels"] = kernels
    return importlib.import_module("bitsandbytes.functional")
