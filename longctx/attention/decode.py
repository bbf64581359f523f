"""Attention of one new token per row over the keys and values of those before it.

On a GPU a Triton kernel that splits the keys (longctx/kernels/split_decode.py), on a CPU naive's
formula. Nothing falls back: what is asked for runs, or a ValueError says what to use instead.
"""

from __future__ import annotations

import importlib
import os
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.attention.mask import Mask
from longctx.attention.naive import Naive
from longctx.kernels import HAS_TRITON
from longctx.kernels.flash_op import HEAD_SIZES


class Visible(NamedTuple):
    """The keys that the new token of each row sees: first .. last (B,) int32 of the `keys` that any
    of them may see.
    """

    first: Tensor
    last: Tensor
    keys: int


def decode_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """ "triton" or "torch", as `name` asks for it; auto is triton on a GPU.

    Raises ValueError, saying what to use instead, where such tensors cannot be served here.
    """
    runs_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if name == "auto":
        name = "triton" if runs_triton else "torch"
    if name == "torch":
        return name
    reason = None
    if not runs_triton:
        reason = "needs a GPU"
    elif not HAS_TRITON:
        reason = "triton is not installed; `pip install triton`"
    elif dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reason = f"takes fp32, bf16 and fp16, not {dtype}"
    elif device.type == "cpu" and dtype == torch.bfloat16:
        reason = "Triton's interpreter computes bf16 products wrongly"
    elif head_dim not in HEAD_SIZES:
        reason = f"takes heads of {HEAD_SIZES[0]} to {HEAD_SIZES[-1]} channels, not {head_dim}"
    if reason is not None:
        raise ValueError(f"decode=triton cannot run here: {reason}; use decode=torch")
    return name


def cached_attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, kernel: str) -> Tensor:
    """out (B, Hq, D) of q (B, Hq, D) over a cache k, v (B, T, Hkv, D); `kernel` as `decode_kernel`
    gives it. Scores are divided by sqrt(D).
    """
    scale = q.shape[-1] ** -0.5
    if kernel == "triton":
        split_decode = importlib.import_module("longctx.kernels.split_decode")  # imports Triton
        out: Tensor = split_decode.decode(q, k, v, visible.first, visible.last, scale)
        return out
    mask = Mask("intervals", first=visible.first[:, None], last=visible.last[:, None])
    k, v = k[:, : visible.keys], v[:, : visible.keys]
    with torch.autocast(q.device.type, enabled=False):
        return Naive().run(q[:, None], k, v, mask, scale)[0][:, 0]
