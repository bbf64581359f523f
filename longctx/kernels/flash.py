"""The flash operator: registered with torch, so that autograd, torch.compile and CUDA graphs see
one opaque call.

Implementations: "triton-portable" (any GPU, and a CPU under TRITON_INTERPRET=1), "triton-hopper"
(Hopper's own instructions), "triton-hopper-ordered" (the same, with a backward that sums dq in one
order) and "torch-tiled" (a CPU). All but triton-hopper give the same bits every time.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import configure
from longctx.kernels.selftest import trust

HEAD_SIZES = range(16, 257)
HOPPER_HEAD_SIZES = range(64, 129, 8)


def implementation(
    device: torch.device, dtype: torch.dtype, head_dim: int, kernel: str = "auto"
) -> str:
    """What serves such tensors where `kernel` is wanted on a GPU.

    "portable" and "hopper" are taken at their word, "auto" is hopper where it runs; hopper is
    ordered where torch is told to use deterministic algorithms.
    """
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "torch-tiled"
    if kernel == "auto":
        kernel = "hopper" if runs_hopper(device, dtype, head_dim) else "portable"
    ordered = kernel == "hopper" and torch.are_deterministic_algorithms_enabled()
    return f"triton-{kernel}-ordered" if ordered else f"triton-{kernel}"


def runs_hopper(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the Hopper kernels run on `device`, with such tensors."""
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or dtype not in (torch.bfloat16, torch.float16)
    ):
        return False
    return head_dim in HOPPER_HEAD_SIZES and torch.cuda.get_device_properties(device).major == 9


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
    """out (B, Tq, Hq, D) and lse (B, Hq, Tq) float32 of q (B, Tq, Hq, D), k and v (B, Tk, Hkv, D)
    under an interval mask.
    """
    if _needs_trust(q, implementation):
        trust("forward", implementation, q, k, functools.partial(run_forward, implementation))
    return run_forward(implementation, q, k, v, first, last, scale)


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
    """dq, dk, dv for the gradient `do` of out and `dlse` (or None) of lse. It has no derivative of
    its own.
    """
    if _needs_trust(q, implementation):
        trust("backward", implementation, q, k, functools.partial(run_backward, implementation))
    return run_backward(
        implementation, do, dlse, q, k, v, out, lse, first, last, qfirst, qlast, scale
    )


def run_forward(
    implementation: str, q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`flash_forward` itself, by the implementation named."""
    if implementation == "torch-tiled":
        from longctx.kernels import tiled

        return tiled.forward(q, k, v, first, last, scale)
    if implementation.startswith("triton-hopper"):
        from longctx.kernels import hopper_forward

        configure(hopper_forward, "hopper_forward", q.device)
        return hopper_forward.forward(q, k, v, first, last, scale)
    from longctx.kernels import portable

    return portable.forward(q, k, v, first, last, scale)


def run_backward(
    implementation: str,
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
    """`flash_backward` itself, by the implementation named."""
    if implementation == "torch-tiled":
        from longctx.kernels import tiled

        return tiled.backward(do, dlse, q, k, v, out, lse, first, last, scale)
    if implementation.startswith("triton-hopper"):
        from longctx.kernels import hopper_backward

        configure(hopper_backward, "hopper_backward", q.device)
        ordered = implementation.endswith("-ordered")
        return hopper_backward.backward(do, dlse, q, k, v, out, lse, qfirst, qlast, scale, ordered)
    from longctx.kernels import portable

    return portable.backward(do, dlse, q, k, v, out, lse, first, last, qfirst, qlast, scale)


def _needs_trust(q: Tensor, implementation: str) -> bool:
    """Whether kernels are compiled for q's device, and a compiler could have broken them; the CPU
    runs torch or an interpreter.
    """
    return q.device.type != "cpu" and implementation.startswith("triton")


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, Tq, Hq, _D = q.shape
    return q.new_empty(q.shape), q.new_empty(B, Hq, Tq, dtype=torch.float32)


@flash_backward.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.implementation = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, first, last, qfirst, qlast, out, lse = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    grads = flash_backward(
        do, dlse, q, k, v, out, lse, first, last, qfirst, qlast, ctx.scale, ctx.implementation
    )
    return *grads, *[None] * 6


flash_forward.register_autograd(_backward, setup_context=_save)
