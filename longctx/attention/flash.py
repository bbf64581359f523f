"""flash: our own FlashAttention, fused and exact in O(T) memory.

Triton on a GPU, tiles in torch on a CPU; the kernels are in longctx/kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longctx.attention.description import DESCRIPTIONS
from longctx.attention.mask import Mask
from longctx.attention.registry import Backend, Gradients, Request, register
from longctx.kernels import HAS_TRITON
from longctx.kernels.attention import (
    AMPERE_HEAD_SIZES,
    HEAD_SIZES,
    HOPPER_HEAD_SIZES,
    Intervals,
    Saved,
    launch,
)
from longctx.kernels.attention.flash_op import (
    flash_backward,
    forward_for,
    implementation,
    runs_ampere,
    runs_hopper,
    trusted,
)


class Flash(Backend):
    """Any interval mask and length, grouped-query, fp32, bf16, fp16; the lse is differentiable.

    `kernel`: portable runs on every GPU. hopper is for Hopper alone, for 16-bit heads of
    `HOPPER_HEAD_SIZES`; ampere for NVIDIA GPUs from sm_80 on, for 16-bit heads of
    `AMPERE_HEAD_SIZES`. These two add dq up in any order unless torch uses deterministic
    algorithms. auto is hopper if that runs, ampere on sm_8x and sm_12x, and portable otherwise.

    In portable NaN and inf reach only the rows that see them. In the other kernels they also reach
    rows of the same tile.
    """

    description = DESCRIPTIONS["flash"]

    def refusal(self, request: Request) -> str | None:
        if request.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"its kernels take fp32, bf16 and fp16, not {request.dtype}; use attention=naive"
        kernel = request.options.get("kernel", "auto")
        if kernel == "hopper" and (reason := _not_hopper(request)):
            return f"kernel=hopper {reason}; use attention.options.kernel=portable"
        shape = request.device, request.dtype, request.head_dim
        if kernel == "ampere" and not runs_ampere(*shape):
            sizes = ", ".join(map(str, AMPERE_HEAD_SIZES))
            return (
                f"kernel=ampere takes bf16 and fp16 with head sizes {sizes} on an NVIDIA GPU from "
                "sm_80 on; use attention.options.kernel=portable"
            )
        if request.softcap and implementation(*shape, kernel).startswith("triton-hopper"):
            return "its Hopper kernels have no softcap; use attention.options.kernel=portable"
        if implementation(*shape, "portable") == "torch-tiled":
            return None
        if request.device.type == "cpu" and request.dtype == torch.bfloat16:
            return (
                "Triton's interpreter computes bf16 products wrongly; "
                "use fp32 or fp16, or unset TRITON_INTERPRET"
            )
        if request.head_dim not in HEAD_SIZES:
            sizes = f"{HEAD_SIZES[0]} to {HEAD_SIZES[-1]}"
            return f"head size {request.head_dim} is outside {sizes}; use attention=naive"
        if not HAS_TRITON:
            return "triton is not installed; `pip install triton`, or use attention=sdpa"
        return None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float,
        kernel: str = "auto",
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, str]:
        chosen = implementation(q.device, q.dtype, q.shape[3], kernel)
        intervals = mask.first, mask.last, mask.qfirst, mask.qlast
        out, lse = forward_for(q, k, v)(q, k, v, *intervals, scale, softcap, chosen)
        return out, lse, chosen

    def backward(
        self,
        do: Tensor,
        saved: Saved,
        mask: Mask,
        scale: float,
        kernel: str = "auto",
        softcap: float | None = None,
    ) -> Gradients:
        q = saved.q
        chosen = implementation(q.device, q.dtype, q.shape[3], kernel)
        assert mask.first is not None and mask.last is not None
        assert mask.qfirst is not None and mask.qlast is not None
        intervals = Intervals(mask.first, mask.last, mask.qfirst, mask.qlast)
        return flash_backward(do, None, saved, intervals, scale, softcap, chosen)

    def kernels_change_at(self, q: Tensor, length: int) -> int:
        return launch.longest_bucket(launch.PORTABLE, q, length) if q.is_cuda else 0

    def compile_tasks(
        self, q: Tensor, k: Tensor, options: Mapping[str, Any]
    ) -> list[Callable[[], object]]:
        # their self-tests compile them
        chosen = implementation(q.device, q.dtype, q.shape[3], options.get("kernel", "auto"))
        return [partial(trusted, part, chosen, q, k) for part in ("forward", "backward")]


def _not_hopper(request: Request) -> str | None:
    if request.device.type != "cuda" or torch.cuda.get_device_properties(request.device).major != 9:
        return "needs a Hopper GPU"
    if not runs_hopper(request.device, request.dtype, request.head_dim):
        return (
            f"takes bf16 and fp16 with head sizes 64, 72 .. {HOPPER_HEAD_SIZES[-1]}, "
            f"not {request.dtype} with {request.head_dim}"
        )
    return None


register("flash", Flash())
