"""flash_attn: the FlashAttention 4, 3 or 2 (Dao et al.) that the user has installed.

longctx installs none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.description import DESCRIPTIONS
from longctx.attention.mask import Mask
from longctx.attention.registry import AttentionRequest, Backend, register
from longctx.attention.sdpa import align_gradient, aligned, beyond_flash_attention
from longctx.kernels.attention import Scores


class Api(NamedTuple):
    """The call of one version."""

    module: str
    lse_flag: str  # the argument for the lse
    no_window: int | None  # its value for no window
    generations: range  # of the GPUs that it runs on


APIS = {
    "4": Api("flash_attn.cute", "return_lse", None, range(9, 99)),
    "3": Api("flash_attn_interface", "return_attn_probs", -1, range(9, 10)),
    "2": Api("flash_attn.flash_attn_interface", "return_attn_probs", -1, range(8, 99)),
}


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# the newest first
INSTALLED = tuple(version for version, api in APIS.items() if _importable(api.module))
PACKAGES = {"auto": "-4", "4": "-4", "3": "-3", "2": ""}


class FlashAttn(Backend):
    """`version`: auto (the newest installed that this GPU can run), 4, 3 or 2."""

    description = DESCRIPTIONS["flash_attn"]

    def refusal(self, request: AttentionRequest) -> str | None:
        wanted = str(request.options.get("version", "auto"))
        if request.device.type != "cuda":
            return "FlashAttention needs a CUDA GPU; use attention=flash"
        installed = [version for version in INSTALLED if wanted in ("auto", version)]
        if not installed:
            version = "" if wanted == "auto" else f" {wanted}"
            command = f"pip install flash-attn{PACKAGES[wanted]}"
            return f"FlashAttention{version} is not installed (`{command}`); use attention=flash"
        generation = torch.cuda.get_device_properties(request.device).major
        if not any(generation in APIS[version].generations for version in installed):
            versions, these = " or ".join(installed), f"GPUs of compute capability {generation}"
            return f"FlashAttention {versions} does not run on {these}; use attention=flash"
        if request.deterministic:
            reason = "it adds dq up in any order, which deterministic=true rules out"
            return f"{reason}; use attention=flash"
        return beyond_flash_attention(request)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, version: Any = "auto"
    ) -> tuple[Tensor, Tensor, str]:
        # the newest version that this GPU runs
        generation = torch.cuda.get_device_properties(q.device).major
        chosen = str(version)
        if version == "auto":
            chosen = next(n for n in INSTALLED if generation in APIS[n].generations)
        api = APIS[chosen]
        module = importlib.import_module(api.module)
        causal = mask.kind != "full"
        window = (api.no_window, api.no_window) if mask.window is None else (mask.window - 1, 0)
        options: dict[str, Any] = {"softmax_scale": scores.scale, "causal": causal}
        options |= {"window_size": window, api.lse_flag: True}
        B, Tq, Hq, _ = q.shape
        q, k, v = aligned(q), aligned(k), aligned(v)
        # packed documents go to the kernel for sequences of several lengths
        if mask.kind == "documents":
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), mask.offsets)
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), mask.longest)
            flat = (x.flatten(0, 1) for x in (q, k, v))
            out, lse, *_ = module.flash_attn_varlen_func(*flat, **options)
            out, lse = out.reshape(q.shape), lse.reshape(Hq, B, Tq).transpose(0, 1)
        else:
            out, lse, *_ = module.flash_attn_func(q, k, v, **options)
        align_gradient(out)
        lse = lse.detach().masked_fill(lse.isinf(), float("-inf"))
        return out, lse, f"flash-attention-{chosen}"

    def versions(self) -> dict[str, str]:
        versions = {}
        for suffix in sorted(set(PACKAGES.values()), reverse=True):
            with suppress(PackageNotFoundError):
                versions[f"flash-attn{suffix}"] = version(f"flash-attn{suffix}")
        return versions


register("flash_attn", FlashAttn())
