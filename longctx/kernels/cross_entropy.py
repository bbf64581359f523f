"""Cross-entropy of logits and its gradient, which takes the logits' place: two readings and one
writing of them.

For a row z of V logits and its target t:  lse = log Σ exp(z),  loss = lse - z[t],  dz = scale (exp(z - lse) - onehot(t)).
One program per row: its first pass keeps a running maximum and sum (arXiv 1805.02867) for every
EIGHT columns of a block, so that threads meet only at its end; its second, which finds the row in
the L2 cache, where few other rows compete, writes dz over z. All arithmetic is fp32, whatever the
logits are stored in. p[t] - 1 is formed as exp(-loss) - 1 without the rounding of p[t], so that a
confident token keeps its gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORED = tl.constexpr(-100)
LOG2E = tl.constexpr(1.4426950408889634)
EIGHT = tl.constexpr(8)
MULTIPLIED = 2048  # elements at a time


@triton.jit
def cross_entropy_kernel(
    z, target, loss, scale, stride_z, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Row i = program: loss[i], and with GRADIENT dz over z[i]; zero both where the target is
    IGNORED.
    """
    i = tl.program_id(0).to(tl.int64)
    row = z + i * stride_z
    t = tl.load(target + i)
    columns = tl.arange(0, BLOCK // EIGHT)[:, None] * EIGHT + tl.arange(0, EIGHT)[None, :]
    if t == IGNORED:
        tl.store(loss + i, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                at = start + columns
                tl.store(
                    row + at, tl.zeros([BLOCK // EIGHT, EIGHT], row.dtype.element_ty), mask=at < V
                )
        return

    x_t = tl.load(row + t).to(tl.float32)  # here, while nobody has written to the row
    m = tl.full([BLOCK // EIGHT], -float("inf"), tl.float32)
    s = tl.zeros([BLOCK // EIGHT], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + columns
        x = tl.load(row + at, mask=at < V, other=-float("inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        m_new = tl.maximum(m, tl.max(x, 1))
        shift = tl.where(
            m_new == -float("inf"), 0.0, m_new
        )  # nothing but columns past the end so far
        s = s * tl.exp2((m - shift) * LOG2E) + tl.sum(tl.exp2((x - shift[:, None]) * LOG2E), 1)
        m = m_new
    highest = tl.max(m, 0)
    s = tl.sum(s * tl.exp2((m - highest) * LOG2E), 0)
    m = highest
    below = (x_t - m) - tl.log(
        s
    )  # log p[t]; x - m comes first, so that no rounding of m is left in it
    tl.store(loss + i, -below)

    if GRADIENT:
        by = tl.load(scale)
        share = by / s
        dz_t = by * tl.where(
            below > -1e-3, below + 0.5 * below * below, tl.exp2(below * LOG2E) - 1.0
        )
        for start in range(0, V, BLOCK):
            at = start + columns
            x = tl.load(row + at, mask=at < V, other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
            dz = tl.where(at == t, dz_t, share * tl.exp2((x - m) * LOG2E))
            tl.store(
                row + at, dz.to(row.dtype.element_ty), mask=at < V, eviction_policy="evict_first"
            )


def cross_entropy_(z: Tensor, target: Tensor, loss: Tensor, scale: Tensor | None) -> None:
    """loss (n,) fp32 of the logits z (n, V), fp32 or 16 bits, against target (n,) int64, -100 where
    not scored.

    Given `scale`, an fp32 scalar on the device, dz, the gradient of `scale` · Σ loss, replaces z.
    Targets outside 0 .. V-1 are not checked.
    """
    n, V = z.shape
    block, warps = launch(V)
    with torch.cuda.device_of(z):
        cross_entropy_kernel[(n,)](
            z, target, loss, scale, z.stride(0), V, scale is not None, block, num_warps=warps
        )


@triton.jit
def multiply_kernel(x, by, N, BLOCK: tl.constexpr):
    factor = tl.load(by)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            y = tl.load(x + at, mask=at < N).to(tl.float32) * factor
            tl.store(x + at, y.to(x.dtype.element_ty), mask=at < N)


def multiply_(x: Tensor, by: Tensor) -> Tensor:
    """x, contiguous, times the fp32 scalar `by` on its device, in place; where that is 1 nothing is
    read, and nobody waits to know.
    """
    with torch.cuda.device_of(x):
        multiply_kernel[(min(1024, triton.cdiv(x.numel(), MULTIPLIED)),)](
            x, by, x.numel(), MULTIPLIED
        )
    return x


def launch(V: int) -> tuple[int, int]:
    """Words per iteration and warps of a program."""
    block = min(16384, max(128, triton.next_power_of_2(V)))
    return block, max(1, block // 512)
