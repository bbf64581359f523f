"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule, and each channel of a head's keys
decays by itself.

So g is a vector. Two matrices, with the width of a head between them, make a of the layer's input,
and two others the output's gate, which is a sigmoid.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longctx.model.mixers.description import Cost, MixerSpec, register
from longctx.model.mixers.gdn import GatedDelta
from longctx.model.recurrent import CHUNK


class KimiDelta(GatedDelta):
    """The gated delta rule with a decay of each channel; the options are those of `gdn`."""

    kernel = "ops.kda:chunk_kda"
    activation = "sigmoid"

    @classmethod
    def weights(cls, spec: MixerSpec) -> Any:
        (_, heads, keys, values), C, weights = cls.sizes(spec), spec.size, super().weights(spec)
        del weights["rates"], weights["gate"]
        decay = {"decay_in": (keys, C), "decay_out": (heads * keys, keys), "strengths": (heads, C)}
        gate = {"gate_in": (values, C), "gate_out": (heads * values, values)}
        return weights | decay | gate | {"dt_bias": (heads * keys,)}

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        (_, heads, keys, values), given = cls.sizes(spec), super().cost(spec, e)
        # a, what is between two matrices, and q kᵀ of chunks; in backward g and gradients in fp32
        saved = given.saved + e * (heads * (keys + CHUNK) + keys + values)
        return Cost(given.flops, saved, given.backward + (e + 20) * heads * keys)

    def rates_of(self, x: Tensor) -> Any:
        keys = self.sizes(self.part).key_size
        return self.strengths(x), self.decay_out(self.decay_in(x)).unflatten(-1, (-1, keys))

    def gates(self, x: Tensor | None) -> Any:
        return self.gate_out(self.gate_in(x))


register("kda", KimiDelta)
