"""Falcon-H1 (arXiv 2507.22448): softmax attention next to Mamba-2, both of one input x.

    out · mamba(x) + attention · softmax(x)

The output of Mamba-2 has no norm. C, B, x, Δ and the gate have factors too, which are options.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.attention import Attention
from longctx.attention.description import AttentionConfig
from longctx.model.layers import SelfAttention
from longctx.model.mixer import Mixer
from longctx.model.mixers.description import Cost, MixerSpec, register
from longctx.model.mixers.mamba2 import Mamba2

INPUTS = ("C_factor", "B_factor", "x_factor", "rate_factor")


class Falcon(Mamba2):
    """Softmax attention next to Mamba-2, with a factor of each part."""

    options = Mamba2.options | dict.fromkeys(
        (*INPUTS, "gate_factor", "out_factor", "attention_factor"), 1.0
    )
    softmax_calls = 1
    lacks = ("qkv_bias", "out_bias", "sinks", "softcap", "qk_norm", "attention_gate")
    # Those of Mamba-2 have no keys and values
    prefill = Mixer.prefill
    step = Mixer.step

    def __init__(self, part: MixerSpec, backend: AttentionConfig) -> None:
        super().__init__(part, backend)
        self.softmax = SelfAttention(part.softmax, backend)

    @classmethod
    def weights(cls, spec: MixerSpec) -> Any:
        own = {name: shape for name, shape in super().weights(spec).items() if name != "norm"}
        return own | {f"softmax.{x.name}": (x.rows, x.columns) for x in spec.softmax.linears}

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        flops, saved, backward = super().cost(spec, e)
        # Both outputs side by side, and their parts; what is gated
        return Cost(flops, saved + 2 * e * spec.query_size, backward)

    @classmethod
    def heads(cls, spec: MixerSpec) -> int:
        return gcd(super().heads(spec), spec.model.kv_heads)

    def project(self, x: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        own = zip(super().project(x), INPUTS, strict=True)
        scaled = (tensor * self.part.options[name] for tensor, name in own)
        return *scaled, *self.softmax.project(x, *angles)

    def both(self, mamba: Any, attend: Any, *tensors: Any) -> Tensor:
        """Return (B, T, 1, channels): this rank's outputs of `mamba` and of `attend`."""
        *inputs, q, k, v, batch = tensors
        outs = mamba(*inputs, batch), attend(q, k, v, batch.mask, self.softmax.scores)
        return torch.cat([out.flatten(2) for out in outs], dim=-1)[:, :, None]

    def forward(self, *tensors: Any) -> Tensor:
        return self.both(super().forward, self.softmax.attend, *tensors)

    def naive(self, *tensors: Any) -> Tensor:
        return self.both(super().naive, Attention("naive", {}), *tensors)

    def branch(self, out: Tensor, x: Tensor | None) -> Any:
        # Each rank that shares the sequence has given both of its own heads
        options, width = self.part.options, self.part.shapes["out"][1] // out.shape[2]
        y, attended = (part.flatten(2) for part in out.tensor_split([width], dim=-1))
        y = self.out(y * F.silu(self.gate(x) * options["gate_factor"]))
        return y * options["out_factor"] + self.softmax.out(attended) * options["attention_factor"]


register("falcon", Falcon)
