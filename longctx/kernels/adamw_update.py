"""AdamW (arXiv 1711.05101): one pass over a tensor, its gradient and its two averages.

    g = factor · gradient,   m = m + (1 - β1)(g - m),   v = β2 v + (1 - β2) g²
    p = (1 - lr · decay) p - lr / (1 - β1^t) · m / (sqrt(v / (1 - β2^t)) + eps)

The factor, which clips, is read on the device: clipping costs no pass over the gradients, and
nothing waits for their norm. Arithmetic is fp32, however the averages are stored.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 8


@triton.jit(do_not_specialize=["N", "shrink", "rate", "root"])
def adamw_kernel(
    p, grad, m, v, factor,
    N, shrink, rate, root, beta1, beta2, eps,
    CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of p, m and v.

    `shrink`: 1 - lr · decay. `rate`: lr / (1 - β1^t). `root`: 1 / sqrt(1 - β2^t).
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p + at, mask=at < N)
    g = tl.load(grad + at, mask=at < N).to(tl.float32)
    if CLIPPED:
        g *= tl.load(factor)
    mean = tl.load(m + at, mask=at < N).to(tl.float32)
    square = tl.load(v + at, mask=at < N).to(tl.float32)
    mean += (1 - beta1) * (g - mean)
    square = beta2 * square + (1 - beta2) * g * g
    tl.store(p + at, shrink * x - rate * mean / (tl.sqrt(square) * root + eps), mask=at < N)
    tl.store(m + at, mean.to(m.dtype.element_ty), mask=at < N)
    tl.store(v + at, square.to(v.dtype.element_ty), mask=at < N)


def adamw_(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    factor: Tensor | None,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update p (N,) fp32 and its averages m and v (N,), fp32 or 16 bits, by grad (N,).

    All are contiguous, on one device. `factor`: an fp32 scalar there that multiplies grad, or None.
    `step` counts from 1.
    """
    rate, root = lr / (1 - betas[0] ** step), 1 / math.sqrt(1 - betas[1] ** step)
    with torch.cuda.device_of(p):
        adamw_kernel[(triton.cdiv(p.numel(), BLOCK),)](
            p,
            grad,
            m,
            v,
            factor,
            p.numel(),
            1 - lr * weight_decay,
            rate,
            root,
            *betas,
            eps,
            CLIPPED=factor is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
