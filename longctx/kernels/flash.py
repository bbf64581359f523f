"""The flash operator: registered with torch, so that autograd, torch.compile and CUDA graphs see one opaque call.

Implementations: "triton-portable" (any GPU, and a CPU under TRITON_INTERPRET=1; deterministic), "triton-hopper" (Hopper's own
instructions; dq is summed in any order) and "torch-tiled" (a CPU).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

HEAD_SIZES = range(16, 257)
HOPPER_HEAD_SIZES = range(64, 129, 8)


def implementation(device: torch.device, kernel: str) -> str:
    """What serves tensors of `device` where `kernel`, "portable" or "hopper", is wanted on a GPU."""
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return f"triton-{kernel}"
    return "torch-tiled"


@torch.library.custom_op("longctx::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """out (B, Tq, Hq, D) and lse (B, Hq, Tq) float32 of q (B, Tq, Hq, D), k and v (B, Tk, Hkv, D) under an interval mask."""
    if implementation == "torch-tiled":
        from longctx.kernels import tiled

        return tiled.forward(q, k, v, first, last, scale)
    if implementation == "triton-hopper":
        from longctx.kernels import hopper_forward

        return hopper_forward.forward(q, k, v, first, last, scale)
    from longctx.kernels import portable

    return portable.forward(q, k, v, first, last, scale)


@torch.library.custom_op("longctx::flash_backward", mutates_args=())
def flash_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    last: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for the gradient `do` of out and `dlse` (or None) of lse. It has no derivative of its own."""
    if implementation == "torch-tiled":
        from longctx.kernels import tiled

        return tiled.backward(do, dlse, q, k, v, out, lse, first, last, scale)
    if implementation == "triton-hopper" and q.shape[3] > 64:  # up to 64 the portable backward is the faster one
        from longctx.kernels import hopper_backward

        return hopper_backward.backward(do, dlse, q, k, v, out, lse, qfirst, qlast, scale)
    from longctx.kernels import portable

    return portable.backward(do, dlse, q, k, v, out, lse, first, last, qfirst, qlast, scale)


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, Tq, Hq, _D = q.shape
    return q.new_empty(q.shape), q.new_empty(B, Hq, Tq, dtype=torch.float32)


@flash_backward.register_fake
def _(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.implementation = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, first, last, qfirst, qlast, out, lse = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    grads = flash_backward(do, dlse, q, k, v, out, lse, first, last, qfirst, qlast, ctx.scale, ctx.implementation)
    return *grads, *[None] * 6


flash_forward.register_autograd(_backward, setup_context=_save)
