"""Exclusive self attention (arXiv 2603.09078): the output without its part along the token's own
value, which the residual stream has anyway.

    y_i = o_i - (o_i·v_i) v_i / |v_i|²,    o = softmax(scale · q kᵀ) v, of each head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from longctx.model.attending import Attending
from longctx.model.mixers import Cost, MixerSpec, register


class ExclusiveAttention(Attending):
    """Softmax attention that excludes the token's own value. Decoding reads each text anew."""

    capturable = True

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        # The output, the direction of v and their product in fp32, and as much of gradients
        return Cost(saved=(e + 12) * spec.query_size, backward=12 * spec.query_size)

    def forward(self, *tensors: Any) -> Tensor:
        q, k, v, batch = tensors
        out = self.attended(q, k, v, batch)
        own = normalize(v.float(), dim=-1).repeat_interleave(q.shape[2] // v.shape[2], 2)
        return (out - (out * own).sum(-1, keepdim=True) * own).to(out.dtype)

    def naive(self, *tensors: Any) -> Tensor:
        q, k, v, batch = tensors
        own = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
        out = torch.einsum("bhij,bjhd->bihd", self.probabilities(q, k, batch), own)
        share = (out * own).sum(-1) / own.square().sum(-1)
        return out - share[..., None] * own


register("xsa", ExclusiveAttention)
