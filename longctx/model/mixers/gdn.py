"""Gated delta rule (arXiv 2412.06464), with the layers around it as in Qwen3-Next and Qwen3.5.

Its formula, with β = σ(b), is in recurrent.py. q and k have length 1, and q is divided by √K. The
output is normed and gated. With β in (0, 2) the state's eigenvalues may be negative (2411.12537).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.model.mixer import Batch, widened
from longctx.model.mixers.description import Cost, MixerSpec, register
from longctx.model.recurrent import CHUNK, Recurrent, Sizes, fla_kernel

EPS = 1e-6  # of the squared lengths of queries and keys


class GatedDelta(Recurrent):
    """The gated delta rule; a key head serves several value heads. null, 0: as in the model."""

    options = {**dict.fromkeys(Sizes._fields), "norm_eps": 0.0, "negative": False}
    kernel: ClassVar[str] = "ops.gated_delta_rule:chunk_gated_delta_rule"
    activation: ClassVar[str] = "silu"

    @classmethod
    def sizes(cls, spec: MixerSpec) -> Sizes:
        # Values are as keys, and these as attention's
        given = {n: x for n, x in spec.options.items() if n in Sizes._fields and x is not None}
        keys = {"key_heads": spec.model.heads, "key_size": spec.model.head_size} | given
        values = {"value_heads": keys["key_heads"], "value_size": keys["key_size"]} | keys
        return Sizes(**values)

    @classmethod
    def weights(cls, spec: MixerSpec) -> Any:
        sizes, C = cls.sizes(spec), spec.size
        heads, norm = sizes.value_heads, {"norm": (sizes.value_size,)}
        matrices = {"rates": ((heads, heads), C), "gate": (sizes.widths[-1], C)}
        return super().weights(spec) | matrices | norm

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        flops, saved, backward = super().cost(spec, e)
        # T; q and k normed are in the place of those before
        return Cost(flops, saved + e * CHUNK * cls.sizes(spec).value_heads, backward)

    def strength(self, rates: Tensor) -> Tensor:
        """Return β, (B, T, heads) like the `rates` b."""
        return widened(rates).sigmoid() * (2 if self.part.options["negative"] else 1)

    def terms(self, batch: Batch | None, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, strengths, rates = tensors
        repeats = values.shape[2] // keys.shape[2]
        wide = (widened(x).repeat_interleave(repeats, dim=2) for x in (queries, keys))
        queries, keys = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in wide)
        queries = queries * queries.shape[3] ** -0.5
        return queries, keys, values, self.decays(rates, batch)[1], self.strength(strengths)

    def fused(self, batch: Batch, *tensors: Tensor, **choices: Any) -> Any:
        *inputs, strengths, rates = tensors
        choices |= {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
        log, bias = map(batch.own_heads, (self.A_log, self.dt_bias))
        given = *inputs, rates, self.strength(strengths).to(rates.dtype)
        return fla_kernel(self.kernel, batch)(*given, A_log=log, dt_bias=bias, **choices)

    def gates(self, x: Tensor | None) -> Any:
        """Return the gate of the output, (B, T, width), of the layer's input."""
        return self.gate(x)

    def branch(self, out: Tensor, x: Tensor | None) -> Any:
        eps = self.part.options["norm_eps"] or self.part.model.norm_eps
        gate = self.gates(x).view(out.shape).to(out.dtype)
        if out.is_cuda:
            kernel = fla_kernel("modules.norm.fused_norm_gate:rms_norm_gated")
            given = out.contiguous(), gate.contiguous(), self.norm, None, self.activation
            return self.out(kernel(*given, eps=eps).flatten(2))
        normed = F.rms_norm(widened(out), self.norm.shape, eps=eps) * self.norm
        gated = normed * getattr(F, self.activation)(widened(gate))
        return self.out(gated.to(out.dtype).flatten(2))


register("gdn", GatedDelta)
