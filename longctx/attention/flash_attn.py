"""flash_attn: the FlashAttention 4, 3 or 2 that the user has installed (Dao et al.); longctx
installs none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from longctx.attention.mask import Mask
from longctx.attention.registry import Request, register
from longctx.attention.sdpa import beyond_flash_attention

# version → its module, how it is asked for the lse, its sign for no window, the GPU generation it
# needs
APIS: dict[str, tuple[str, str, int | None, int]] = {
    "4": ("flash_attn.cute", "return_lse", None, 9),
    "3": ("flash_attn_interface", "return_attn_probs", -1, 9),
    "2": ("flash_attn.flash_attn_interface", "return_attn_probs", -1, 8),
}


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


INSTALLED = tuple(version for version, api in APIS.items() if _found(api[0]))  # newest first
PACKAGES = {"auto": "-4", "4": "-4", "3": "-3", "2": ""}


class FlashAttn:
    """`version`: auto (the newest installed that this GPU can run), 4, 3 or 2."""

    options: dict[str, tuple[Any, ...]] = {"version": ("auto", 4, 3, 2)}
    reproducible = {
        f"flash-attention-{version}": ("out",) for version in APIS
    }  # dq is added up in any order

    def refusal(self, request: Request) -> str | None:
        wanted = str(request.options.get("version", "auto"))
        if request.device.type != "cuda":
            return "FlashAttention needs a CUDA GPU; use attention=flash"
        if not INSTALLED or (wanted != "auto" and wanted not in INSTALLED):
            asked = "" if wanted == "auto" else f" {wanted}"
            return f"FlashAttention{asked} is not installed (`pip install flash-attn{PACKAGES[wanted]}`); use attention=flash"
        if (
            wanted != "auto"
            and torch.cuda.get_device_properties(request.device).major < APIS[wanted][3]
        ):
            return f"FlashAttention {wanted} needs a newer GPU; use attention=flash"
        if request.deterministic:
            return "it adds dq up in any order, which deterministic=true rules out; use attention=flash"
        return beyond_flash_attention(request)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, version: str | int = "auto"
    ) -> tuple[Tensor, Tensor, str]:
        generation = torch.cuda.get_device_properties(q.device).major
        chosen = (
            str(version)
            if version != "auto"
            else next(n for n in INSTALLED if APIS[n][3] <= generation)
        )
        name, lse_flag, no_window, _ = APIS[chosen]
        api = importlib.import_module(name)
        causal = mask.kind != "full"
        window = (no_window, no_window) if mask.window is None else (mask.window - 1, 0)
        options = {"softmax_scale": scale, "causal": causal, "window_size": window, lse_flag: True}
        B, Tq, Hq, _ = q.shape
        if mask.kind == "documents":
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), mask.offsets)
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), mask.longest)
            out, lse, *_ = api.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (q, k, v)), **options
            )
            out, lse = out.reshape(q.shape), lse.reshape(Hq, B, Tq).transpose(0, 1)
        else:
            out, lse, *_ = api.flash_attn_func(q, k, v, **options)
        return (
            out,
            lse.detach().masked_fill(lse.isinf(), float("-inf")),
            f"flash-attention-{chosen}",
        )


register("flash_attn", FlashAttn())
