"""Kernels between the matmuls: norm, rotary, SwiGLU, loss, AdamW, eight-bit copies.

Here, a linear layer of 16-bit inputs and fp32 weights, whose gradient is not rounded on a GPU.
Autocast would cast the weight to 16 bits, compute its gradient in them and cast that back: one
rounding of every sum and one more pass over it. Here the product's own fp32 sums are the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dyᵀ x (O, I) of dy (..., O) and x (..., I), in `dtype`."""
    # On a GPU fp32 sums of 16-bit inputs are never rounded
    dy, x = dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    if dy.is_cuda and dtype == torch.float32 and dy.dtype != dtype:
        return torch.mm(dy, x, out_dtype=dtype)
    return (dy @ x).to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return F.linear(x, narrow, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow = ctx.saved_tensors
        dx = dy @ narrow if ctx.needs_input_grad[0] else None
        dweight = weight_gradient(dy, x, ctx.dtypes[0]) if ctx.needs_input_grad[1] else None
        dbias = None
        if ctx.needs_input_grad[2]:
            dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=ctx.dtypes[1])
        return dx, dweight, dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b: x (..., I), weight (O, I), bias (O,)."""
    if x.itemsize < weight.itemsize:
        y: Tensor = _Linear.apply(x, weight, bias)
        return y
    return F.linear(x, weight, bias)
