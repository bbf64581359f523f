"""The flash operator: registered with torch, so that autograd, torch.compile and CUDA graphs see one opaque call.

It chooses the implementation for a device and nothing else: the portable Triton kernels on a GPU (and on a CPU under
TRITON_INTERPRET=1), tiles in plain torch on a CPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

HEAD_SIZES = range(16, 257)


def implementation(device: torch.device) -> str:
    """The implementation that serves tensors of `device`: "triton-portable" or "torch-tiled"."""
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return "triton-portable"
    return "torch-tiled"


@torch.library.custom_op("longctx::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, qfirst: Tensor, qlast: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out (B, Tq, Hq, D) and lse (B, Hq, Tq) float32 of q (B, Tq, Hq, D), k and v (B, Tk, Hkv, D) under an interval mask."""
    if implementation(q.device) == "torch-tiled":
        from longctx.kernels import tiled

        return tiled.forward(q, k, v, first, last, scale)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for the gradient `do` of out and `dlse` (or None) of lse. It has no derivative of its own."""
    if implementation(q.device) == "torch-tiled":
        from longctx.kernels import tiled

        return tiled.backward(do, dlse, q, k, v, out, lse, first, last, scale)
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
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, first, last, qfirst, qlast, out, lse = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    grads = flash_backward(do, dlse, q, k, v, out, lse, first, last, qfirst, qlast, ctx.scale)
    return *grads, None, None, None, None, None


flash_forward.register_autograd(_backward, setup_context=_save)
