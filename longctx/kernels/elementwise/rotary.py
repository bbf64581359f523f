"""Rotary position embedding (arXiv 2104.09864) of q and k, one pass each way.

    (q1, q2) → (q1 cos - q2 sin, q2 cos + q1 sin),   k alike,   v as it is

Forward reads the heads of q and k from the qkv projection's output; v stays there. Backward
rotates dq and dk back and writes them and dv side by side, as the projection's gradient. Arithmetic
is fp32, whatever is stored.

Shapes: N tokens, H query and G key-value heads of D channels, cos and sin (N, D/2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # channels of half heads that a program rotates


@triton.jit
def _program_tile(PARTS, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's first head, its tokens n, heads h and channels c of a half."""
    # Heads are counted over q's, then k's, then v's; a program has HEADS of one of them.
    # programs of the same tokens are neighbours: cos and sin stay in cache
    part, row = tl.program_id(0) % PARTS, tl.arange(0, TOKENS * HEADS)
    n = (tl.program_id(0) // PARTS).to(tl.int64) * TOKENS + row // HEADS
    first, h = part * HEADS, part * HEADS + row % HEADS
    return first, n[:, None], h[:, None], tl.arange(0, BLOCK)[None, :]


@triton.jit
def rope_kernel(
    qkv, q, k, cos, sin, N, H, G,  # (N, H + 2 G, D), (N, H, D), (N, G, D), (N, D/2) fp32
    HALF: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write q and k, rotated, of qkv."""
    first, n, h, c = _program_tile((H + G) // HEADS, TOKENS, HEADS, BLOCK)
    inside = (n < N) & (c < HALF)
    at = (n * (H + 2 * G) + h) * (2 * HALF) + c
    # the two halves of a head rotate together
    x1 = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(qkv + at + HALF, mask=inside, other=0.0).to(tl.float32)
    co = tl.load(cos + n * HALF + c, mask=inside, other=0.0)
    si = tl.load(sin + n * HALF + c, mask=inside, other=0.0)
    if first < H:  # noqa: SIM108, longer as one line
        # a program has heads of q or of k, never of both
        to = q + (n * H + h) * (2 * HALF) + c
    else:
        to = k + (n * G + h - H) * (2 * HALF) + c
    tl.store(to, (x1 * co - x2 * si).to(qkv.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (x2 * co + x1 * si).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def rope_backward_kernel(
    dq, dk, dv, dqkv, cos, sin, N, H, G,  # shaped as q, k, v and qkv; cos, sin (N, D/2) fp32
    HALF: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dqkv: dq and dk rotated back, and dv."""
    first, n, h, c = _program_tile((H + 2 * G) // HEADS, TOKENS, HEADS, BLOCK)
    inside = (n < N) & (c < HALF)
    if first < H:
        # q's heads come first in the projection, then k's, then v's
        at = dq + (n * H + h) * (2 * HALF) + c
    elif first < H + G:
        at = dk + (n * G + h - H) * (2 * HALF) + c
    else:
        at = dv + (n * G + h - H - G) * (2 * HALF) + c
    x1, x2 = tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
    # dv passes through unrotated
    if first < H + G:
        co = tl.load(cos + n * HALF + c, mask=inside, other=0.0)
        si = tl.load(sin + n * HALF + c, mask=inside, other=0.0)
        y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
        x1, x2 = (y1 * co + y2 * si).to(x1.dtype), (y2 * co - y1 * si).to(x2.dtype)
    to = dqkv + (n * (H + 2 * G) + h) * (2 * HALF) + c
    tl.store(to, x1, mask=inside)
    tl.store(to + HALF, x2, mask=inside)


def launch_config(H: int, G: int, D: int) -> tuple[int, int, int, int]:
    """Return tokens and heads of a program, the width of a half, and warps; heads divide H, G."""
    both = math.gcd(H, G)
    block, heads = triton.next_power_of_2(D // 2), both & -both
    # about 1,024 channels of half heads keep a program's loads wide
    heads = min(heads, max(1, TILE // block))
    tokens = max(1, TILE // (heads * block))
    return tokens, heads, block, max(1, tokens * heads * block // 256)


@torch.library.custom_op("longctx::rope", mutates_args=())
def rope(qkv: Tensor, cos: Tensor, sin: Tensor, H: int, G: int) -> tuple[Tensor, Tensor]:
    """Return q (N, H, D) and k (N, G, D), rotated, of contiguous qkv (N, (H + 2 G) D)."""
    N, D = qkv.shape[0], qkv.shape[1] // (H + 2 * G)
    q, k = qkv.new_empty(N, H, D), qkv.new_empty(N, G, D)
    tokens, heads, block, warps = launch_config(H, G, D)
    with torch.cuda.device_of(qkv):
        rope_kernel[(triton.cdiv(N, tokens) * ((H + G) // heads),)](
            qkv, q, k, cos, sin, N, H, G, D // 2, tokens, heads, block, num_warps=warps
        )
    return q, k


@torch.library.custom_op("longctx::rope_backward", mutates_args=())
def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return dqkv (N, (H + 2 G) D) for dq (N, H, D), dk and dv (N, G, D); all contiguous."""
    (N, H, D), G = dq.shape, dk.shape[1]
    dqkv = dq.new_empty(N, (H + 2 * G) * D)
    tokens, heads, block, warps = launch_config(H, G, D)
    with torch.cuda.device_of(dq):
        rope_backward_kernel[(triton.cdiv(N, tokens) * ((H + 2 * G) // heads),)](
            dq, dk, dv, dqkv, cos, sin, N, H, G, D // 2, tokens, heads, block, num_warps=warps
        )
    return dqkv


@rope.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, H: int, G: int) -> tuple[Tensor, Tensor]:
    N, D = qkv.shape[0], qkv.shape[1] // (H + 2 * G)
    return qkv.new_empty(N, H, D), qkv.new_empty(N, G, D)


@rope_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return dq.new_empty(dq.shape[0], (dq.shape[1] + 2 * dk.shape[1]) * dq.shape[2])


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, H: int, G: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = rope(qkv, cos, sin, H, G)
        return q, k, qkv.unflatten(1, (H + 2 * G, -1))[:, H + G :]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (x.contiguous() for x in (dq, dk, dv))
        return rope_backward(*gradients, *ctx.saved_tensors), None, None, None, None


def rotated(qkv: Tensor, cos: Tensor, sin: Tensor, H: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, T, H, D) and k (B, T, G, D), rotated by their positions, and v (B, T, G, D).

    qkv is (B, T, (H + 2 G) D), cos and sin (B, T, 1, D/2) fp32.
    """
    rows = qkv.shape[:2]
    angles = (t.reshape(-1, t.shape[-1]).contiguous() for t in (cos, sin))
    q, k, v = _Rotated.apply(qkv.reshape(-1, qkv.shape[-1]).contiguous(), *angles, H, G)
    return q.view(*rows, *q.shape[1:]), k.view(*rows, *k.shape[1:]), v.unflatten(0, rows)
