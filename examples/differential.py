"""Differential attention (arXiv 2410.05258): the noise of two softmaxes cancels in a difference.

    o = (softmax(scale · q1 k1ᵀ) - λ softmax(scale · q2 k2ᵀ)) v,    y = (1 - λ0) norm(o)
    λ = exp(a1·b1) - exp(a2·b2) + λ0,    a, b learned, of all heads of the layer

Two key heads in succession are k1 and k2, and their values are one v of twice the channels. So it
has the weights of softmax attention, and calls it for either half of v.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from longctx.model.attending import Attending
from longctx.model.mixers import Cost, MixerSpec, register


class DifferentialAttention(Attending):
    """The difference of two softmaxes; `start` is λ0, one for all layers. Decoding reads each text
    anew.
    """

    options: ClassVar[dict[str, Any]] = {"start": 0.8}
    softmax_calls: ClassVar[int] = 2
    capturable = True
    mix: Tensor
    scales: Tensor

    @classmethod
    def more(cls, spec: MixerSpec) -> dict[str, tuple[int, ...]]:
        return {"mix": (4 * spec.model.head_size,), "scales": (2 * spec.model.head_size,)}

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        # Outputs side by side, their difference and its norm, which is in fp32
        return Cost(saved=(3 * e + 6) * spec.query_size, backward=(4 * e + 4) * spec.query_size)

    @classmethod
    def heads(cls, spec: MixerSpec) -> int:
        return int(spec.model.kv_heads) // 2

    @classmethod
    def problem(cls, spec: MixerSpec) -> str | None:
        if spec.model.kv_heads % 2:
            return f"model.kv_heads={spec.model.kv_heads}: pairs of heads; give an even number"
        if not 0 <= (start := spec.options["start"]) < 1:
            return f"start={start}: give a number from 0 up, below 1"
        return super().problem(spec)

    def start(self, name: str, weight: Tensor) -> None:
        if name == "scales":
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, std=0.1)

    def subtracted(self, both: Tensor) -> Tensor:
        """Return y (B, T, H, D) of the outputs of the two, (B, T, pairs, 2, group, 2D)."""
        start = self.part.options["start"]
        # The gradient of torch's `prod` waits for the GPU, which a CUDA graph cannot
        a, b = self.mix.float().view(2, 2, -1).unbind(1)
        added, taken = (a * b).sum(1).exp()
        share = added - taken + start
        difference = both[:, :, :, 0].float() - share * both[:, :, :, 1].float()
        normed = rms_norm(difference, self.scales.shape, self.scales.float(), 1e-5)
        return ((1 - start) * normed.to(both.dtype)).flatten(2).unflatten(2, (-1, self.head_dim))

    def forward(self, *tensors: Any) -> Tensor:
        q, k, v, batch = tensors
        halves = v.unflatten(2, (-1, 2)).unbind(3)
        outs = [self.attended(q, k, half.repeat_interleave(2, 2), batch) for half in halves]
        both = torch.cat(outs, dim=-1)
        return self.subtracted(both.unflatten(2, (k.shape[2] // 2, 2, -1)))

    def naive(self, *tensors: Any) -> Tensor:
        q, k, v, batch = tensors
        weights = self.probabilities(q, k, batch).unflatten(1, (k.shape[2] // 2, 2, -1))
        both = torch.einsum("bpsgij,bjpd->bipsgd", weights, v.unflatten(2, (-1, 2)).flatten(3))
        return self.subtracted(both)


register("differential", DifferentialAttention)
