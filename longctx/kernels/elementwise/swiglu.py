"""SwiGLU (arXiv 2002.05202) between its projections: one pass over gate and up each way.

    act = silu(gate) · up,   s = sigmoid(gate)
    dup = dact · gate · s,   dgate = dact · up · s (1 + gate (1 - s))

GELU in its tanh form (arXiv 1606.08415) is gate · sigmoid(z) too, and dz/dgate times the term with
1 - s is the only difference:

    z = a (gate + b gate³),   a = 2 sqrt(2 / π),   b = 0.044715

gate and up lie side by side in one tensor (N, 2F), and so do their gradients: every element is read
once. torch.compile's concatenation would read it for both halves. Backward
computes act again beside the gradients, for the gradient of the down projection, so that act (N, F)
is not saved. Arithmetic is fp32, whatever is stored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from longctx.kernels.elementwise import weight_gradient

A, B = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)


@triton.jit
def swiglu_kernel(gate_up, act, width, BLOCK: tl.constexpr, GELU: tl.constexpr = False):
    """Compute BLOCK columns of one row of act."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_up + row * 2 * width + c, mask=c < width, other=0.0).to(tl.float32)
    # up is `width` numbers behind gate in the same row
    u = tl.load(gate_up + row * 2 * width + width + c, mask=c < width, other=0.0).to(tl.float32)
    z = g * A * (1.0 + g * g * B) if GELU else g
    to = act + row * width + c
    tl.store(to, (g * tl.sigmoid(z) * u).to(act.dtype.element_ty), mask=c < width)


@triton.jit
def swiglu_backward_kernel(
    gate_up, dact, dgate_up, act, width, BLOCK: tl.constexpr, GELU: tl.constexpr = False
):
    """Compute BLOCK columns of one row of dgate and dup, and of act."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_up + row * 2 * width + c, mask=c < width, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * width + width + c, mask=c < width, other=0.0).to(tl.float32)
    d = tl.load(dact + row * width + c, mask=c < width, other=0.0).to(tl.float32)
    # one sigmoid serves silu and its derivative
    s = tl.sigmoid(g * A * (1.0 + g * g * B) if GELU else g)
    silu = g * s
    if GELU:
        dg = d * u * (s + silu * (1.0 - s) * (g * g * (3.0 * A * B) + A))
    else:
        dg = d * u * (s + silu * (1.0 - s))
    to = dgate_up.dtype.element_ty
    tl.store(dgate_up + row * 2 * width + c, dg.to(to), mask=c < width)
    tl.store(dgate_up + row * 2 * width + width + c, (d * silu).to(to), mask=c < width)
    # act again, as the down projection's weight gradient needs it
    tl.store(act + row * width + c, (silu * u).to(to), mask=c < width)


@torch.library.custom_op("longctx::swiglu", mutates_args=())
def swiglu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Return act (N, F) of gate_up (N, 2F), contiguous; `activation` is silu or gelu_tanh."""
    N, width = gate_up.shape[0], gate_up.shape[1] // 2
    act = gate_up.new_empty(N, width)
    grid, block = _grid(N, width)
    with torch.cuda.device_of(gate_up):
        swiglu_kernel[grid](gate_up, act, width, block, activation == "gelu_tanh")
    return act


@torch.library.custom_op("longctx::swiglu_backward", mutates_args=())
def swiglu_backward(
    gate_up: Tensor, dact: Tensor, activation: str = "silu"
) -> tuple[Tensor, Tensor]:
    """Return dgate_up (N, 2F) for the gradient dact (N, F), and act (N, F); inputs contiguous."""
    N, width = dact.shape
    dgate_up, act = torch.empty_like(gate_up), torch.empty_like(dact)
    grid, block = _grid(N, width)
    with torch.cuda.device_of(gate_up):
        is_gelu = activation == "gelu_tanh"
        swiglu_backward_kernel[grid](gate_up, dact, dgate_up, act, width, block, is_gelu)
    return dgate_up, act


@swiglu.register_fake
def _(gate_up: Tensor, activation: str = "silu") -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@swiglu_backward.register_fake
def _(gate_up: Tensor, dact: Tensor, activation: str = "silu") -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(dact)


def _grid(N: int, width: int) -> tuple[tuple[int, int], int]:
    # a program of four warps has at most 2,048 columns
    block = min(2048, triton.next_power_of_2(width))
    return (N, triton.cdiv(width, block)), block


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        with_output: bool,
        activation: str,
    ) -> Tensor:
        ctx.activation = activation
        # saved in 16 bits, as the product takes it
        narrow = weight.to(gate_up.dtype)
        ctx.save_for_backward(gate_up, narrow)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        if not with_output:
            # the recomputation in backward needs no output
            return gate_up.new_zeros(1).expand(len(gate_up), len(weight))
        act = swiglu(gate_up, activation)
        return F.linear(act, narrow, None if bias is None else bias.to(gate_up.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, narrow = ctx.saved_tensors
        dgate_up, act = swiglu_backward(gate_up, dy @ narrow, ctx.activation)
        dweight = weight_gradient(dy, act, ctx.dtypes[0]) if ctx.needs_input_grad[1] else None
        dbias = dy.sum(0, dtype=ctx.dtypes[1]) if ctx.needs_input_grad[2] else None
        return dgate_up, dweight, dbias, None, None


def gated_down(
    gate_up: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    with_output: bool = True,
    activation: str = "silu",
) -> Tensor:
    """Return activation(gate) · up through the down projection, (..., C) of gate_up's dtype.

    gate_up is (..., 2F), weight (C, F), bias (C,). Only gate_up is saved for backward. Without
    `with_output` the result is 0 and only its gradients are right: a recomputation in backward
    wants no more, and saves a third of the MLP's products.
    """
    rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
    y: Tensor = _GatedDown.apply(rows, weight, bias, with_output, activation)
    return y.view(*gate_up.shape[:-1], -1)
