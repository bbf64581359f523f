"""AdamW (arXiv 1711.05101): one pass over a tensor, its gradient and its two moments.

    g = factor · gradient,   m = m + (1 - β1)(g - m),   v = β2 v + (1 - β2) g²
    p = (1 - lr · decay) p - lr / (1 - β1^t) · m / (sqrt(v / (1 - β2^t)) + eps)

The factor, which clips, is read on the device: clipping costs no pass over the gradients, and
nothing waits for their norm. So are the numbers that change with every step: a CUDA graph of the
launch serves all steps. Arithmetic is fp32, however the moments are stored.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 8


@triton.jit
def adamw_kernel(
    p, grad, m, v, factor, rates,  # (N,) each; factor () and rates (3,) fp32
    N, beta1, beta2, eps,
    CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of p, m and v (N,), read 16 bytes at a time if 16 divides N."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < N
    g = tl.load(grad + at, mask=there).to(tl.float32)
    if CLIPPED:
        g *= tl.load(factor)
    # moments may be stored in bf16; arithmetic is fp32
    mean = tl.load(m + at, mask=there).to(tl.float32)
    square = tl.load(v + at, mask=there).to(tl.float32)
    mean += (1 - beta1) * (g - mean)
    square = beta2 * square + (1 - beta2) * g * g
    # rates are read on the device: a CUDA graph serves every step
    x = tl.load(rates) * tl.load(p + at, mask=there)
    x -= tl.load(rates + 1) * mean / (tl.sqrt(square) * tl.load(rates + 2) + eps)
    tl.store(p + at, x, mask=there)
    tl.store(m + at, mean.to(m.dtype.element_ty), mask=there)
    tl.store(v + at, square.to(v.dtype.element_ty), mask=there)


def rates_of(
    step: int, lr: float, betas: tuple[float, float], weight_decay: float
) -> tuple[float, float, float]:
    """Return 1 - lr · decay, lr / (1 - β1^t) and 1 / sqrt(1 - β2^t) of step t, from 1 on."""
    shrink = 1 - lr * weight_decay
    return shrink, lr / (1 - betas[0] ** step), 1 / math.sqrt(1 - betas[1] ** step)


def adamw_(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    factor: Tensor | None,
    rates: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update p (N,) fp32 and its moments m and v (N,), fp32 or 16 bits, by grad (N,).

    All are contiguous, on one device. `factor`: an fp32 scalar there that multiplies grad, or None.
    `rates` (3,) fp32: those of `rates_of`.
    """
    with torch.cuda.device_of(p):
        adamw_kernel[(triton.cdiv(p.numel(), BLOCK),)](
            p, grad, m, v, factor, rates, p.numel(), *betas, eps,
            CLIPPED=factor is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
