"""Frozen weights of LoRA in 4 bits: lora.base=nf4.

    y = x Wᵀ + b,   dx = dy W,   W = unpacked(weight)

A packed weight is a parameter of bytes. Each row has its codes and its scales, so rows are packed,
read, sharded and saved alone, and nothing casts them. W exists during its product only.

    W = c · a, c one of 16 quantiles of a normal distribution, a the largest of 64 weights (QLoRA,
    arXiv 2305.14314), by bitsandbytes' kernels. a is a byte too: low + step · level, with two fp32
    numbers a row
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longctx.kernels import linear as plain_linear
from longctx.spec.parts import NF4_BLOCK as BLOCK
from longctx.spec.parts import packed_width

RANGE = 8  # bytes of two fp32 numbers
LEAST = 1e-30  # step of a row of zeros


def is_packed(weight: Any) -> bool:
    return bool(weight.dtype == torch.uint8)


def columns(width: int) -> int:
    """Return the weights in a row of `width` bytes."""
    return (width - RANGE) // (BLOCK // 2 + 1) * BLOCK


def packed(values: Tensor) -> Tensor:
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
    I = columns(weight.shape[1])
    sizes = I // 2, I // BLOCK, RANGE
    codes, levels, ends = weight[:, : sum(sizes)].split(sizes, dim=1)
    low, step = ends.contiguous().view(torch.float32).split(1, dim=1)
    functional = bitsandbytes()
    kind = {"shape": torch.Size((len(weight), I)), "blocksize": BLOCK, "quant_type": "nf4"}
    state = functional.QuantState((low + step * levels).flatten(), dtype=dtype, **kind)
    return functional.dequantize_4bit(codes.reshape(-1, 1), state)


@unpacked.register_fake
def _(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.new_empty(len(weight), columns(weight.shape[1]), dtype=dtype)


@torch.library.custom_op("longctx::packed_product", mutates_args=())
def packed_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ of x (N, I), in x's dtype."""
    return F.linear(x, unpacked(weight, x.dtype))


@packed_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight))


class _PackedProduct(torch.autograd.Function):
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
    y = _PackedProduct.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias.to(y.dtype)


def parameter(weight: Tensor) -> nn.Parameter:
    """Return `weight` packed; one on "meta" holds nothing."""
    empty = weight.new_empty(len(weight), packed_width(weight.shape[1]), dtype=torch.uint8)
    return nn.Parameter(empty if weight.is_meta else packed(weight.detach()), requires_grad=False)


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
