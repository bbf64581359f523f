"""naive: scores, softmax and weighted sum as the formula says, with the (Tq, Tk) matrix in memory.

The oracle of the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.attention.mask import Mask
from longctx.attention.registry import Backend, Request, register


class Naive(Backend):
    """Runs on every device, dtype, head size and mask; memory grows with Tq·Tk."""

    differentiable_lse = True
    reproducible = {"torch matmul and softmax": ("out", "dq", "dk", "dv")}

    def refusal(self, request: Request) -> str | None:
        return None

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, str]:
        B, Tq, Hq, D = q.shape
        Tk, Hkv = k.shape[1], k.shape[2]
        qh = q.transpose(1, 2).reshape(B, Hkv, Hq // Hkv * Tq, D)
        scores = (qh @ k.permute(0, 2, 3, 1)).reshape(B, Hq, Tq, Tk)
        accumulate = torch.promote_types(scores.dtype, torch.float32)
        scores = (scores.to(accumulate) * scale).masked_fill(~visible(mask, Tk), float("-inf"))
        lse = scores.logsumexp(dim=-1)
        p = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp().to(v.dtype)
        out = p.reshape(B, Hkv, Hq // Hkv * Tq, Tk) @ v.transpose(1, 2)
        return out.reshape(B, Hq, Tq, D).transpose(1, 2), lse.float(), "torch matmul and softmax"


def visible(mask: Mask, Tk: int) -> Tensor:
    """(B or 1, 1, Tq, Tk) bool of a bound mask."""
    assert mask.first is not None and mask.last is not None
    j = torch.arange(Tk, device=mask.first.device)
    return ((j >= mask.first[..., None]) & (j <= mask.last[..., None]))[:, None]


register("naive", Naive())
