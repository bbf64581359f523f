"""Rotary position embedding (arXiv 2104.09864) between the qkv projection and attention: one pass over both, each way.

    (q1, q2) → (q1 cos - q2 sin, q2 cos + q1 sin),   k alike,   v as it is

Forward reads the heads of q and k where the projection wrote them; v stays there. Backward turns dq and dk back and writes them
and dv to where the projection's gradient is wanted, side by side. Arithmetic is fp32, whatever is stored.

Shapes: N tokens, H query and G key-value heads of D channels, cos and sin (N, D/2).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # half-head channels that a program turns


@triton.jit
def rope_kernel(qkv, q, k, cos, sin, H, G, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    h, c = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (h < H + G) & (c < HALF)
    from_qkv = (n * (H + 2 * G) + h) * (2 * HALF) + c
    x1 = tl.load(qkv + from_qkv, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(qkv + from_qkv + HALF, mask=inside, other=0.0).to(tl.float32)
    co = tl.load(cos + n * HALF + c, mask=c < HALF, other=0.0)
    si = tl.load(sin + n * HALF + c, mask=c < HALF, other=0.0)
    y1, y2 = (x1 * co - x2 * si).to(q.dtype.element_ty), (x2 * co + x1 * si).to(q.dtype.element_ty)
    to_q, to_k = (n * H + h) * (2 * HALF) + c, (n * G + h - H) * (2 * HALF) + c
    tl.store(q + to_q, y1, mask=inside & (h < H))
    tl.store(q + to_q + HALF, y2, mask=inside & (h < H))
    tl.store(k + to_k, y1, mask=inside & (h >= H))
    tl.store(k + to_k + HALF, y2, mask=inside & (h >= H))


@triton.jit
def rope_backward_kernel(
    dq, dk, dv, dqkv, cos, sin, H, G, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    h, c = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (h < H + 2 * G) & (c < HALF)
    is_q, is_v = inside & (h < H), inside & (h >= H + G)
    is_k = inside & (h >= H) & (h < H + G)
    at_q, at_k, at_v = ((n * H + h) * 2 * HALF + c, (n * G + h - H) * 2 * HALF + c, (n * G + h - H - G) * 2 * HALF + c)
    x1 = tl.load(dq + at_q, mask=is_q, other=0.0) + tl.load(dk + at_k, mask=is_k, other=0.0)
    x2 = tl.load(dq + at_q + HALF, mask=is_q, other=0.0) + tl.load(dk + at_k + HALF, mask=is_k, other=0.0)
    x1 = (x1 + tl.load(dv + at_v, mask=is_v, other=0.0)).to(tl.float32)  # of the three one is not 0
    x2 = (x2 + tl.load(dv + at_v + HALF, mask=is_v, other=0.0)).to(tl.float32)
    co = tl.where(is_v, 1.0, tl.load(cos + n * HALF + c, mask=c < HALF, other=0.0))
    si = tl.where(is_v, 0.0, tl.load(sin + n * HALF + c, mask=c < HALF, other=0.0))
    to = (n * (H + 2 * G) + h) * (2 * HALF) + c
    tl.store(dqkv + to, (x1 * co + x2 * si).to(dqkv.dtype.element_ty), mask=inside)
    tl.store(dqkv + to + HALF, (x2 * co - x1 * si).to(dqkv.dtype.element_ty), mask=inside)


def launch(heads: int, D: int) -> tuple[int, int, int]:
    """Heads of a program, the width of a half in it, and warps."""
    block = triton.next_power_of_2(D // 2)
    together = min(triton.next_power_of_2(heads), max(1, TILE // block))
    return together, block, max(1, together * block // 256)


@torch.library.custom_op("longctx::rope", mutates_args=())
def rope(qkv: Tensor, cos: Tensor, sin: Tensor, H: int, G: int) -> tuple[Tensor, Tensor]:
    """q (N, H, D) and k (N, G, D), turned, of qkv (N, (H + 2 G) D); all contiguous."""
    N, D = qkv.shape[0], qkv.shape[1] // (H + 2 * G)
    q, k = qkv.new_empty(N, H, D), qkv.new_empty(N, G, D)
    heads, block, warps = launch(H + G, D)
    with torch.cuda.device_of(qkv):
        rope_kernel[(N, triton.cdiv(H + G, heads))](qkv, q, k, cos, sin, H, G, D // 2, heads, block, num_warps=warps)
    return q, k


@torch.library.custom_op("longctx::rope_backward", mutates_args=())
def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient (N, (H + 2 G) D) of qkv for those of q (N, H, D), of k and of v (N, G, D); all contiguous."""
    (N, H, D), G = dq.shape, dk.shape[1]
    dqkv = dq.new_empty(N, (H + 2 * G) * D)
    heads, block, warps = launch(H + 2 * G, D)
    with torch.cuda.device_of(dq):
        rope_backward_kernel[(N, triton.cdiv(H + 2 * G, heads))](
            dq, dk, dv, dqkv, cos, sin, H, G, D // 2, heads, block, num_warps=warps
        )
    return dqkv


@rope.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, H: int, G: int) -> tuple[Tensor, Tensor]:
    N, D = qkv.shape[0], qkv.shape[1] // (H + 2 * G)
    return qkv.new_empty(N, H, D), qkv.new_empty(N, G, D)


@rope_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return dq.new_empty(dq.shape[0], (dq.shape[1] + 2 * dk.shape[1]) * dq.shape[2])


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, H: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = rope(qkv, cos, sin, H, G)
        return q, k, qkv.view(len(qkv), H + 2 * G, -1)[:, H + G :]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return (
            rope_backward(dq.contiguous(), dk.contiguous(), dv.contiguous(), *ctx.saved_tensors),
            None,
            None,
            None,
            None,
        )


def turned(qkv: Tensor, cos: Tensor, sin: Tensor, H: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv (B, T, (H + 2 G) D), cos and sin (B, T, 1, D/2) fp32 → q (B, T, H, D), k and v (B, T, G, D)."""
    rows = qkv.shape[:2]
    angles = (t.reshape(-1, t.shape[-1]).contiguous() for t in (cos, sin))
    q, k, v = _Turned.apply(qkv.reshape(-1, qkv.shape[-1]).contiguous(), *angles, H, G)
    return q.view(*rows, H, -1), k.view(*rows, G, -1), v.unflatten(0, rows)
