"""flash: our own FlashAttention. Fused, exact, O(T) memory; deterministic; on a GPU in Triton, on a CPU in torch tiles."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from longctx.attention.mask import Mask
from longctx.attention.registry import Request, register
from longctx.kernels.flash import HEAD_SIZES, flash_forward, implementation

HAS_TRITON = importlib.util.find_spec("triton") is not None


class Flash:
    """Any interval mask, any length, grouped-query, fp32, bf16, fp16; the lse is differentiable too."""

    options: dict[str, tuple[Any, ...]] = {}

    def refusal(self, request: Request) -> str | None:
        if request.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"its kernels take fp32, bf16 and fp16, not {request.dtype}; use attention=naive"
        if implementation(request.device) == "torch-tiled":
            return None
        if request.device.type == "cpu" and request.dtype == torch.bfloat16:
            return "Triton's interpreter computes bf16 products wrongly; use fp32 or fp16, or unset TRITON_INTERPRET"
        if request.head_dim not in HEAD_SIZES:
            return f"head size {request.head_dim} is outside {HEAD_SIZES[0]} to {HEAD_SIZES[-1]}; use attention=naive"
        if not HAS_TRITON:
            return "triton is not installed; `pip install triton`, or use attention=sdpa"
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor, str]:
        out, lse = flash_forward(q, k, v, mask.first, mask.last, mask.qfirst, mask.qlast, scale)
        return out, lse, implementation(q.device)


register("flash", Flash())
