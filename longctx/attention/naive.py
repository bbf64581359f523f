"""naive: scores, softmax and weighted sum as the formula says, with the (Tq, Tk) matrix in memory.

The oracle of the others. `cached_attention` is the same formula for one new token per sequence over
a cache of keys and values; on a GPU a Triton kernel splits the keys instead
(kernels/attention/decoding.py).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.attention.description import DESCRIPTIONS
from longctx.attention.mask import Mask
from longctx.attention.registry import Backend, Request, register, with_sinks
from longctx.kernels import HAS_TRITON
from longctx.kernels.attention import HEAD_SIZES


class Naive(Backend):
    """Runs on every device, dtype, head size and mask; memory grows with Tq·Tk."""

    description = DESCRIPTIONS["naive"]

    def refusal(self, request: Request) -> str | None:
        return None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, str]:
        B, Tq, Hq, D = q.shape
        Tk, Hkv = k.shape[1], k.shape[2]
        # query heads of a group become rows, so k is not repeated
        qh = q.transpose(1, 2).reshape(B, Hkv, Hq // Hkv * Tq, D)
        scores = (qh @ k.permute(0, 2, 3, 1)).reshape(B, Hq, Tq, Tk)
        # softmax in fp32 at least
        accumulate = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(accumulate) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~visible(mask, Tk), float("-inf"))
        lse = scores.logsumexp(dim=-1)
        # a blind query's lse is -inf: its exponentials are 0, not NaN
        p = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp().to(v.dtype)
        out = p.reshape(B, Hkv, Hq // Hkv * Tq, Tk) @ v.transpose(1, 2)
        return out.reshape(B, Hq, Tq, D).transpose(1, 2), lse.float(), "torch matmul and softmax"


def visible(mask: Mask, Tk: int) -> Tensor:
    """Return (B or 1, 1, Tq, Tk) bool of a bound mask."""
    assert mask.first is not None and mask.last is not None
    j = torch.arange(Tk, device=mask.first.device)
    return ((j >= mask.first[..., None]) & (j <= mask.last[..., None]))[:, None]


class Visible(NamedTuple):
    """Visible keys of each row's new token: first .. last (B,) int32; no row sees beyond `keys`."""

    first: Tensor
    last: Tensor
    keys: int


def decode_kernel(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float | None = None,
    sinks: bool = False,
) -> str:
    """Return "triton" or "torch", as `name` asks; auto is triton on a GPU if it can serve.

    Raises ValueError with a remedy if the kernel cannot serve such tensors here.
    """
    runs_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if name == "auto":
        name = "triton" if runs_triton and softcap is None and not sinks else "torch"
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
    elif softcap is not None:
        reason = "has no softcap"
    elif sinks:
        reason = "has no sinks"
    elif head_dim not in HEAD_SIZES:
        reason = f"takes heads of {HEAD_SIZES[0]} to {HEAD_SIZES[-1]} channels, not {head_dim}"
    if reason is not None:
        raise ValueError(f"decode=triton cannot run here: {reason}; use decode=torch")
    return name


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    kernel: str,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return out (B, Hq, D) of q (B, Hq, D) over a cache k, v (B, T, Hkv, D).

    `kernel` is as `decode_kernel` returned it. `scale` defaults to D**-0.5.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "triton":
        from longctx.kernels import decoding  # imports Triton

        out: Tensor = decoding.decode(q, k, v, visible.first, visible.last, scale)
        return out
    mask = Mask("intervals", first=visible.first[:, None], last=visible.last[:, None])
    k, v = k[:, : visible.keys], v[:, : visible.keys]
    with torch.autocast(q.device.type, enabled=False):
        out, lse, _ = Naive().run(q[:, None], k, v, mask, scale, softcap)
        return (out if sinks is None else with_sinks(out, lse, sinks)[0])[:, 0]


register("naive", Naive())
