"""The base of mixers that are softmax attention with something before or after it, in mixers/.

They have what a model gives its attention layers: projections, norms of q and k, rotary positions,
windows, a gate. Their `forward` gets q (B, T, H, D), k and v (B, T, Hkv, D), and calls `attended`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from longctx.model.layers import SelfAttention
from longctx.model.mixer import Batch, Mixer
from longctx.model.mixers.description import MixerSpec


class Attending(Mixer, SelfAttention):
    """A mixer that calls softmax attention; `more` names its weights besides those."""

    share: ClassVar[str | None] = "heads"
    softmax_calls: ClassVar[int] = 1
    lacks = ("qkv_bias", "out_bias", "sinks", "softcap")

    @classmethod
    def weights(cls, spec: MixerSpec) -> Mapping[str, tuple[Any, ...]]:
        plain = spec.softmax
        shapes: dict[str, tuple[Any, ...]] = {x.name: (x.rows, x.columns) for x in plain.linears}
        return shapes | {name: (size,) for name, size in plain.vectors} | cls.more(spec)

    @classmethod
    def more(cls, spec: MixerSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight that softmax attention does not have."""
        return {}

    @classmethod
    def heads(cls, spec: MixerSpec) -> int:
        return int(spec.model.kv_heads)

    # Those of attention: Mixer comes first, and has others
    project: Any = SelfAttention.project
    branch = SelfAttention.branch

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, key_bias: Any = None, **functions: Any
    ) -> Tensor:
        """Return softmax attention (B, T, H, D), by the backend; `key_bias` is (B, H, T) fp32.

        `score_mod` and `mask_mod`, as of `register_score`, may use tensors that train; see `needs`.
        """
        attend = self.attend.scored(**functions) if functions else self.attend
        return attend(q, k, v, batch.mask, self.scores._replace(key_bias=key_bias))

    def probabilities(self, q: Tensor, k: Tensor, batch: Batch, bias: Tensor | float = 0) -> Tensor:
        """Return the softmax (B, H, T, T) of scores + bias, by the formula."""
        keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        scores = torch.einsum("bihd,bjhd->bhij", q, keys) * (self.scale or self.head_dim**-0.5)
        return (scores + bias).masked_fill(~batch.seen[:, None], -torch.inf).softmax(-1)
