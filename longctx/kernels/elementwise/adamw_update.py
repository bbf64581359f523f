"""AdamW (arXiv 1711.05101): one pass over a tensor, its gradient and its two moments.

    g = factor · gradient,   m = m + (1 - β1)(g - m),   v = β2 v + (1 - β2) g²
    p = (1 - lr · decay) p - lr / (1 - β1^t) · m / (sqrt(v / (1 - β2^t)) + eps)

The factor, which clips, is read on the device: clipping costs no pass over the gradients, and
nothing waits for their norm. So are the numbers that change with every step: a CUDA graph of the
launch serves all steps. Arithmetic is fp32, however the moments are stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 8
ALIGNED = 16  # bytes, of every tensor's address in one launch for all


@triton.jit
def updated(x, g, m, v, shrink, rate, root, beta1, beta2, eps):
    """Return p, m and v after a step; `shrink`, `rate` and `root` as of `rates_of`."""
    mean, square = m.to(tl.float32), v.to(tl.float32)
    mean += (1 - beta1) * (g - mean)
    square = beta2 * square + (1 - beta2) * g * g
    x = shrink * x - rate * mean / (tl.sqrt(square) * root + eps)
    return x, mean.to(m.dtype), square.to(v.dtype)


@triton.jit
def update_block(
    p, grad, m, v, factor, rates,
    start, N, beta1, beta2, eps,
    CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update elements start : start + BLOCK of p, m and v (N,).

    A whole block needs no mask, and is read 16 bytes at a time.
    """
    at = start + tl.arange(0, BLOCK)
    shrink, rate, root = tl.load(rates), tl.load(rates + 1), tl.load(rates + 2)
    if start + BLOCK <= N:
        g = tl.load(grad + at).to(tl.float32)
        if CLIPPED:
            g *= tl.load(factor)
        x, mean, square = updated(
            tl.load(p + at), g, tl.load(m + at), tl.load(v + at),
            shrink, rate, root, beta1, beta2, eps,
        )  # fmt: skip
        tl.store(p + at, x)
        tl.store(m + at, mean)
        tl.store(v + at, square)
    else:
        there = at < N
        g = tl.load(grad + at, mask=there).to(tl.float32)
        if CLIPPED:
            g *= tl.load(factor)
        x, mean, square = updated(
            tl.load(p + at, mask=there), g,
            tl.load(m + at, mask=there), tl.load(v + at, mask=there),
            shrink, rate, root, beta1, beta2, eps,
        )  # fmt: skip
        tl.store(p + at, x, mask=there)
        tl.store(m + at, mean, mask=there)
        tl.store(v + at, square, mask=there)


@triton.jit(do_not_specialize=["N"])
def adamw_kernel(
    p, grad, m, v, factor, rates,
    N, beta1, beta2, eps,
    CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of one tensor."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    update_block(p, grad, m, v, factor, rates, start, N, beta1, beta2, eps, CLIPPED, BLOCK)


@triton.jit
def multi_tensor_adamw_kernel(
    places, owners, factor,
    beta1, beta2, eps,
    COLUMNS: tl.constexpr, MOMENT: tl.constexpr, CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of one of many tensors; `places` and `owners` as in `TensorTable`."""
    block = tl.program_id(0)
    place = places + tl.load(owners + block).to(tl.int64) * COLUMNS
    p = tl.multiple_of(tl.load(place).to(tl.pointer_type(tl.float32)), 16)
    grad = tl.multiple_of(tl.load(place + 1).to(tl.pointer_type(tl.float32)), 16)
    m = tl.multiple_of(tl.load(place + 2).to(tl.pointer_type(MOMENT)), 16)
    v = tl.multiple_of(tl.load(place + 3).to(tl.pointer_type(MOMENT)), 16)
    rates = tl.load(place + 4).to(tl.pointer_type(tl.float32))
    start = (block - tl.load(place + 6)) * BLOCK
    N = tl.load(place + 5)
    update_block(p, grad, m, v, factor, rates, start, N, beta1, beta2, eps, CLIPPED, BLOCK)


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


class TensorTable(NamedTuple):
    """Addresses of the tensors of one launch."""

    # (n, 7) int64 on the device: addresses of p, grad, m, v and rates, elements, first block.
    places: Tensor
    owners: Tensor  # (blocks,) int32 on the device: which tensor a block is of
    moment: torch.dtype  # of m and v


def table_of(
    tensors: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
) -> TensorTable | None:
    """Return the table of tensors p, grad, m, v and rates, each as in `adamw_`; they must not move.

    None if one launch cannot update them: gradients not fp32 and contiguous, moments not all fp32
    or all bf16, or addresses that are no multiple of ALIGNED.
    """
    moments = {x.dtype for _, _, *both, _ in tensors for x in both}
    if moments not in ({torch.float32}, {torch.bfloat16}) or not all(
        grad.dtype == torch.float32
        and all(x.is_contiguous() and x.data_ptr() % ALIGNED == 0 for x in (p, grad, m, v))
        for p, grad, m, v, _ in tensors
    ):
        return None
    blocks = torch.tensor([triton.cdiv(p.numel(), BLOCK) for p, *_ in tensors])
    firsts = (blocks.cumsum(0) - blocks).tolist()
    rows = [
        [*(x.data_ptr() for x in of_one), of_one[0].numel(), first]
        for of_one, first in zip(tensors, firsts, strict=True)
    ]
    owners = torch.repeat_interleave(torch.arange(len(tensors), dtype=torch.int32), blocks)
    device = tensors[0][0].device
    return TensorTable(torch.tensor(rows).to(device), owners.to(device), *moments)


def multi_tensor_adamw_(
    places: TensorTable, factor: Tensor | None, betas: tuple[float, float], eps: float
) -> None:
    """Update all tensors of `places` as `adamw_` does one, to the same bits, in one launch."""
    with torch.cuda.device_of(places.owners):
        multi_tensor_adamw_kernel[(len(places.owners),)](
            places.places,
            places.owners,
            factor,
            *betas,
            eps,
            COLUMNS=places.places.shape[1],
            MOMENT=tl.bfloat16 if places.moment == torch.bfloat16 else tl.float32,
            CLIPPED=factor is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
