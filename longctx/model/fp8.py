"""Products of linear layers in FP8, for training: precision=fp8.

    y = x Wᵀ,   dx = dy W,   dW = dyᵀ x

x and W are rounded to e4m3, dy to e5m2 (arXiv 2209.05433), each with one scale for the whole
tensor, from its own largest value now; sums are fp32. Weights, their gradients and the optimizer
stay in fp32, whatever is not a product of a block in bf16. In eval mode a layer computes in bf16.
Backward takes the input's transposed copy in FP8, and makes that of the weight anew.

Shapes: N tokens, I and O channels of a layer's input and output.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longctx.kernels import HAS_TRITON, linear
from longctx.model.gpt import GPT
from longctx.model.layers import FLOATS, Linear, fused
from longctx.model.lora import LoraLinear

if HAS_TRITON:
    from longctx.kernels import quantize, swiglu

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-30  # see longctx.kernels.elementwise.quantize
# Fast sums of cuBLAS have 14 bits, too coarse for gradients (arXiv 2412.19437, 3.3.2)
FAST_FORWARD, FAST_BACKWARD = True, False


class Quantized(NamedTuple):
    """A matrix (R, C) in FP8; a copy that was not asked for is empty."""

    rows: Tensor  # (R, C)
    columns: Tensor  # (C, R), R padded with zeros to a multiple of 16
    scale: Tensor  # (), what to multiply by


def quantized(
    x: Tensor,
    dtype: torch.dtype,
    rows: bool = True,
    columns: bool = True,
    scale: Tensor | None = None,
) -> Quantized:
    """Return the requested copies of x (R, C) in `dtype`, by x's own scale if none is given."""
    # On a GPU one kernel of ours makes both
    x = x.contiguous()
    if fused(x, FLOATS):
        return Quantized(*quantize.quantize(x, scale, dtype, rows, columns))
    largest = torch.finfo(dtype).max
    if scale is None:
        amax = x.abs().amax().float().nan_to_num(nan=torch.nan, posinf=torch.nan)
        # A tensor: a GPU would multiply by 1 / a number, and round otherwise than our kernel
        scale = amax.clamp(min=LEAST) / torch.full_like(amax, largest)
    q = (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)
    transposed = F.pad(q.view(torch.uint8).t(), (0, -len(x) % 16)).contiguous().view(dtype)
    empty = q.new_empty(0)
    return Quantized(q if rows else empty, transposed if columns else empty, scale)


def product(a: Any, b: Any, dtype: torch.dtype, fast: bool, bias: Any = None) -> Tensor:
    """Return a bᵀ (M, N) in `dtype` of a (M, K) and b (N, K), each in FP8 with its scale."""
    options = {"bias": bias, "out_dtype": dtype, "use_fast_accum": fast}
    return torch._scaled_mm(a[0], b[0].t(), a[1], b[1], **options)


class _Product(torch.autograd.Function):
    """x Wᵀ + b of x (N, I), or of activation(gate) · up if x (N, 2I) is `gated` by that one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Any, gated: str, trains: bool, with_output: bool
    ) -> Tensor:
        x8 = w8 = None
        if with_output:
            trained_as_is = trains and not gated
            x8 = quantized(swiglu.swiglu(x, gated) if gated else x, VALUES, columns=trained_as_is)
            w8 = quantized(weight, VALUES, columns=False)
        # torch.compile wants tensors only: x takes the place of a missing one
        ctx.save_for_backward(
            x if x8 is None or gated else x8.columns,
            x if x8 is None else x8.scale,
            weight,
            x if w8 is None else w8.scale,
        )
        ctx.has_scales, ctx.gated, ctx.dtype = with_output, gated, x.dtype
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        if x8 is None or w8 is None:
            return x.new_zeros(1).expand(len(x), len(weight))
        b = None if bias is None else bias.to(x.dtype)
        return product((x8.rows, x8.scale), (w8.rows, w8.scale), x.dtype, FAST_FORWARD, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, w, w_scale = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad[:3]
        dy8 = quantized(dy, GRADIENTS, rows=needs_dx or bool(ctx.gated), columns=needs_dweight)
        dx = dweight = None
        if needs_dx or ctx.gated:
            known = w_scale if ctx.has_scales else None
            _, w, w_scale = quantized(w, VALUES, rows=False, scale=known)
            dx = product((dy8.rows, dy8.scale), (w, w_scale), ctx.dtype, FAST_BACKWARD)
        if ctx.gated:
            dx, act = swiglu.swiglu_backward(x, dx, ctx.gated)
            if needs_dweight:
                known = x_scale if ctx.has_scales else None
                _, x, x_scale = quantized(act, VALUES, rows=False, scale=known)
        if needs_dweight:
            dweight = product((dy8.columns, dy8.scale), (x, x_scale), ctx.dtypes[0], FAST_BACKWARD)
        dbias = dy.sum(0, dtype=ctx.dtypes[1]) if needs_dbias else None
        return dx, dweight, dbias, None, None, None


class Product(nn.Module):
    """A layer's product in FP8. It has no weights and no buffers, so names stay as they are."""

    def forward(
        self, x: Tensor, weight: Tensor, bias: Any, with_output: bool = True, gated: str = ""
    ) -> Tensor:
        """Return x Wᵀ + b, x (..., I), or the `gated_down` of swiglu.py, x (..., 2I)."""
        if not self.training and gated:
            return swiglu.gated_down(x, weight, bias, with_output, gated)
        if not self.training:
            return linear(x, weight, bias)
        trains = torch.is_grad_enabled() and weight.requires_grad
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = _Product.apply(rows, weight, bias, gated, trains, with_output)
        return y.view(*x.shape[:-1], -1)

    gated_down = forward


def convert(model: GPT, bf16_layers: Collection[int] = ()) -> GPT:
    """Train the linear layers of all blocks but `bf16_layers` in FP8; block -1 is the last."""
    skipped = {n % len(model.blocks) for n in bf16_layers}
    for n, block in enumerate(model.blocks):
        for module in list(block.modules()):
            if n not in skipped and isinstance(module, Linear | LoraLinear):
                module.product = Product()
    return model
