"""The forgetting transformer (arXiv 2503.02130): scores fall with what each head forgets between
the key and the query.

    s_ij = scale · q_i·k_j + log f_{j+1} + ... + log f_i,    f_t = σ(w·x_t + b), of each head

What is constant in a document cancels in the softmax. So this is a bias of each key, minus the sum
of log f up to it. Keys that are forgotten weigh nothing, and flash leaves them out (2504.06949).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from longctx.attention import Attention
from longctx.attention.description import AttentionConfig
from longctx.model.attending import Attending
from longctx.model.mixers import Batch, Cost, MixerSpec, register


class Fox(Attending):
    """Forgetting attention; `remember` is b. Decoding reads each text anew."""

    capturable = True
    needs = frozenset({"key_bias"})
    exact = ("remember",)

    def __init__(self, part: MixerSpec, backend: AttentionConfig) -> None:
        super().__init__(part, backend)
        if "prune" in self.attend.description.options:
            self.attend = Attention(backend.backend, {"prune": True} | backend.options)

    @classmethod
    def more(cls, spec: MixerSpec) -> dict[str, tuple[int, ...]]:
        return {"forget": (spec.model.heads, spec.size), "remember": (spec.model.heads,)}

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        # Gates, and in fp32 their logits and sums
        return Cost(saved=(e + 8) * spec.model.heads, backward=8 * spec.model.heads)

    def project(self, x: Tensor, *angles: Tensor) -> Any:  # type: ignore[override]
        return *super().project(x, *angles), self.forget(x)

    def log_f(self, gates: Tensor, batch: Batch) -> Tensor:
        """Return log f (B, H, T) of the gates (B, T, H)."""
        return logsigmoid(gates.float() + batch.own_heads(self.remember)).transpose(1, 2)

    def forward(self, *tensors: Any) -> Tensor:
        q, k, v, gates, batch = tensors
        # fp64: in a long row the sums are much larger than the differences that count
        sums = running_sums(self.log_f(gates, batch).double())
        # Each document's from its first token on, or the ones before would round it. A constant
        # of a document has no gradient.
        first = torch.arange(batch.length, device=batch.device) - batch.positions
        before = sums.detach().gather(2, first[:, None].expand_as(sums))
        return self.attended(q, k, v, batch, key_bias=(before - sums).float())

    def naive(self, *tensors: Any) -> Tensor:
        q, k, v, gates, batch = tensors
        forgotten = self.log_f(gates, batch).cumsum(2)
        bias = forgotten[..., None] - forgotten[:, :, None]
        probabilities = self.probabilities(q, k, batch, bias)
        values = v.repeat_interleave(q.shape[2] // k.shape[2], 2)
        return torch.einsum("bhij,bjhd->bihd", probabilities, values)


def running_sums(x: Tensor) -> Tensor:
    """Return the sums of x (..., T) up to each token."""
    if not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1)
    # On a GPU torch's cumsum has no fixed order: sums over 2, 4, 8, ... tokens instead
    for step in (2**n for n in range((x.shape[-1] - 1).bit_length())):
        x = x + pad(x[..., :-step], (step, 0))
    return x


register("fox", Fox)
