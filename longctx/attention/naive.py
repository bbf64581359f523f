"""naive: scores, softmax and weighted sum as the formula says, with the (Tq, Tk) matrix in memory.

The oracle of the others. It also computes the new tokens of texts that are generated, for every
backend that is exact; on a GPU a Triton kernel splits the keys instead
(kernels/attention/decoding.py).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from longctx.attention.description import DESCRIPTIONS
from longctx.attention.mask import Mask
from longctx.attention.registry import AttentionRequest, Backend, Output, mods, register, scaled
from longctx.kernels import HAS_TRITON
from longctx.kernels.attention import IMPLEMENTATIONS, Scores
from longctx.kernels.attention.key_bias import reference


class Naive(Backend):
    """Runs on every device, dtype, head size and mask; memory grows with Tq·Tk."""

    description = DESCRIPTIONS["naive"]

    def refusal(self, request: AttentionRequest) -> str | None:
        return None

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, score: Any = "none"
    ) -> Output:
        assert scores.scale is not None
        B, Tq, Hq, D = q.shape
        Tk, Hkv = k.shape[1], k.shape[2]
        # query heads of a group become rows, so k is not repeated
        qh = q.transpose(1, 2).reshape(B, Hkv, Hq // Hkv * Tq, D)
        s = (qh @ k.permute(0, 2, 3, 1)).reshape(B, Hq, Tq, Tk)
        # softmax in fp32 at least
        s = s.to(torch.promote_types(s.dtype, torch.float32)) * scores.scale
        if scores.softcap is not None:
            s = scores.softcap * (s / scores.softcap).tanh()
        score_mod, mask_mod = mods(score, mask, B)
        # b, h, i, j, each along its own dimension of the scores
        counts = (torch.arange(n, device=s.device) for n in s.shape)
        at = [x.view(-1, *[1] * (3 - dim)) for dim, x in enumerate(counts)]
        s = s if score_mod is None else score_mod(s, *at)
        if scores.key_bias is not None:
            bias = scores.key_bias.to(s.dtype)
            s = s + (bias[:, :, None] - reference(bias, mask.last)[..., None])
        sees = visible(mask, Tk) if mask_mod is None else visible(mask, Tk) & mask_mod(*at)
        s = s.masked_fill(~sees, float("-inf"))
        lse = s.logsumexp(dim=-1)
        # a blind query's lse is -inf: its exponentials are 0, not NaN
        p = (s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp().to(v.dtype)
        out = p.reshape(B, Hkv, Hq // Hkv * Tq, Tk) @ v.transpose(1, 2)
        return out.reshape(B, Hq, Tq, D).transpose(1, 2), lse.float(), "torch matmul and softmax"

    decode: Any = run


def visible(mask: Mask, Tk: int) -> Tensor:
    """Return (B or 1, 1, Tq, Tk) bool of a bound mask."""
    assert mask.first is not None and mask.last is not None
    j = torch.arange(Tk, device=mask.first.device)
    return ((j >= mask.first[..., None]) & (j <= mask.last[..., None]))[:, None]


def splits_keys(
    device: torch.device, dtype: torch.dtype, head_dim: int, scores: frozenset[str]
) -> bool:
    """Return True if the kernel that splits the keys serves new tokens here."""
    on_gpu = device.type == "cuda"
    runs_triton = HAS_TRITON and (on_gpu or os.environ.get("TRITON_INTERPRET") == "1")
    # Triton's interpreter computes bf16 products wrongly
    takes = dtype in (torch.float32, torch.float16) or (dtype == torch.bfloat16 and on_gpu)
    sizes = IMPLEMENTATIONS["triton-portable"].head_sizes
    return runs_triton and takes and "softcap" not in scores and head_dim in sizes


def by_triton(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> Tensor:
    """Return what `Naive.decode` does, (B, 1, Hq, D), by the kernel that splits the keys."""
    from longctx.kernels import decoding  # imports Triton

    assert mask.first is not None and mask.last is not None
    ends = mask.first[:, 0], mask.last[:, 0]
    scale, _, sinks, key_bias = scaled(scores, q)
    out: Tensor = decoding.decode(q[:, 0], k, v, *ends, scale, sinks=sinks, key_bias=key_bias)
    return out[:, None]


register("naive", Naive())
