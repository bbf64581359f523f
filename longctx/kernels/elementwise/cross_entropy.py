"""Cross-entropy of logits and its gradient, which overwrites the logits: read twice, written once.

For a row z of V logits and its target t:

    lse = log Σ exp(z),   loss = lse - z[t],   dz = scale (exp(z - lse) - onehot(t))

A z-loss of factor a multiplies exp(z - lse) in dz by 1 + 2 a lse, the gradient of loss + a lse².

One program per row. Its first pass keeps a running maximum m and sum s (arXiv 1805.02867) for every
EIGHT columns of a block, so that threads meet only at its end. Its second pass, which still finds
the row in the L2 cache, writes dz over z. All arithmetic is fp32, whatever the logits are stored
in. p[t] - 1 is formed as exp(-loss) - 1 without the rounding of p[t], so that a confident token
keeps its gradient.
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
    z, target, loss,  # (n, V), rows stride_z apart; (n,) int64; (n,) fp32
    squares, scale,  # (n,), () fp32, or None
    z_loss, stride_z, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write loss[i] of row i = program, and with GRADIENT dz over z[i]; 0 if t is IGNORED.

    Unless `squares` is None, dz has a z-loss and squares[i] becomes lse², if t is not IGNORED.
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
                zeros = tl.zeros([BLOCK // EIGHT, EIGHT], row.dtype.element_ty)
                tl.store(row + at, zeros, mask=at < V)
        return

    # lse and loss
    x_t = tl.load(row + t).to(tl.float32)  # here, while nobody has written to the row
    m = tl.full([BLOCK // EIGHT], -float("inf"), tl.float32)
    s = tl.zeros([BLOCK // EIGHT], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + columns
        x = tl.load(row + at, mask=at < V, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 1))
        # -inf: nothing but columns past the end so far
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        s = s * tl.exp2((m - shift) * LOG2E) + tl.sum(tl.exp2((x - shift[:, None]) * LOG2E), 1)
        m = m_new
    highest = tl.max(m, 0)
    s = tl.sum(s * tl.exp2((m - highest) * LOG2E), 0)
    m = highest
    # x - m comes first, so that no rounding of m is left in it
    log_p_t = (x_t - m) - tl.log(s)
    tl.store(loss + i, -log_p_t)

    # dz
    if GRADIENT:
        by = tl.load(scale)
        growth = 0.0
        if squares is not None:
            lse = m + tl.log(s)
            growth = 2.0 * z_loss * lse
            tl.store(squares + i, lse * lse)
        share = by * (1.0 + growth) / s
        near_0 = log_p_t > -1e-3  # here exp(log p) - 1 would lose digits: its series
        series = log_p_t + 0.5 * log_p_t * log_p_t
        dz_t = by * tl.where(near_0, series, tl.exp2(log_p_t * LOG2E) - 1.0)
        dz_t += by * growth * tl.exp2(log_p_t * LOG2E)
        for start in range(0, V, BLOCK):
            at = start + columns
            x = tl.load(row + at, mask=at < V, other=0.0, eviction_policy="evict_first")
            x = x.to(tl.float32)
            dz = tl.where(at == t, dz_t, share * tl.exp2((x - m) * LOG2E)).to(row.dtype.element_ty)
            tl.store(row + at, dz, mask=at < V, eviction_policy="evict_first")


def cross_entropy_(
    z: Tensor,
    target: Tensor,
    loss: Tensor,
    scale: Tensor | None,
    z_loss: float = 0.0,
    squares: Tensor | None = None,
) -> None:
    """Write loss (n,) fp32 of the logits z (n, V), fp32 or 16 bits, against target (n,) int64.

    A target of -100 is not scored; others outside 0 .. V-1 are not checked. Given `scale`, an fp32
    scalar on the device, dz, the gradient of `scale` · Σ loss, replaces z. `squares`, (n,) zeros,
    become lse²; then dz is the gradient of `scale` · Σ (loss + `z_loss` · lse²).
    """
    n, V = z.shape
    block, warps = launch_config(V)
    with torch.cuda.device_of(z):
        cross_entropy_kernel[(n,)](
            *(z, target, loss, squares, scale, z_loss, z.stride(0), V, scale is not None, block),
            num_warps=warps,
        )


@triton.jit
def multiply_kernel(x, by, N, BLOCK: tl.constexpr):
    """Compute x *= by, unless that is 1."""
    factor = tl.load(by)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            y = tl.load(x + at, mask=at < N).to(tl.float32) * factor
            tl.store(x + at, y.to(x.dtype.element_ty), mask=at < N)


def multiply_(x: Tensor, by: Tensor) -> Tensor:
    """Multiply x, contiguous, by the fp32 scalar `by` on its device, in place.

    If that is 1, x is not read; the host does not wait to know.
    """
    # few programs with loops: most calls find a factor of 1 and end at once
    programs = min(1024, triton.cdiv(x.numel(), MULTIPLIED))
    with torch.cuda.device_of(x):
        multiply_kernel[(programs,)](x, by, x.numel(), MULTIPLIED)
    return x


def launch_config(V: int) -> tuple[int, int]:
    """Return columns per iteration and warps of a program."""
    # a row is read in blocks that fit into registers
    block = min(16384, max(128, triton.next_power_of_2(V)))
    return block, max(1, block // 512)
