"""Mamba-2 (arXiv 2405.21060), as in Granite 4, Nemotron-H and Falcon-H1.

A head has a state S (N, P), and all heads of a group have the same B and C (N):

    S = e^g S + B (Δ x)ᵀ,   y = Cᵀ S + D x,   Δ = softplus(δ + dt),   g = −e^A Δ

This is the formula of recurrent.py without β: q, k and v are C, B and Δ x. The output y silu(z) is
normed in each group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.model.mixer import Batch, widened
from longctx.model.mixers.description import Cost, MixerSpec, register
from longctx.model.recurrent import Recurrent, Sizes, fla_kernel


class Mamba2(Recurrent):
    """A state space with a decay of each head; null: heads for twice the width; least_step ≤ Δ."""

    options = {"heads": None, "head_size": 64, "state": 128, "groups": 1, "least_step": 0.0}

    @classmethod
    def sizes(cls, spec: MixerSpec) -> Sizes:
        heads, size, state, groups, *_ = spec.options.values()
        heads = 2 * spec.size // max(size, 1) if heads is None else heads
        return Sizes(groups, heads, state, size)

    @classmethod
    def weights(cls, spec: MixerSpec) -> Any:
        (_, heads, *_), widths, C = (sizes := cls.sizes(spec)), sizes.widths, spec.size
        matrices = {"gate": (widths[-1], C), "rates": (heads, C)}
        others = {"shift": (widths,), "D": (heads,), "norm": (widths[-1],)}
        return super().weights(spec) | matrices | others

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        (_, heads, state, size), given = cls.sizes(spec), super().cost(spec, e)
        # Δ x; in backward B and C of each head, and their gradients
        saved, backward = given.saved + e * heads * size, given.backward + 4 * e * heads * state
        return Cost(given.flops, saved, backward)

    def terms(self, batch: Batch | None, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        *groups, inputs, rates = tensors
        repeats, (steps, decays) = inputs.shape[2] // groups[0].shape[2], self.decays(rates, batch)
        queries, keys = (tensor.repeat_interleave(repeats, dim=2) for tensor in groups)
        return queries, keys, (steps[..., None] * inputs).to(inputs.dtype), decays, None

    def fused(self, batch: Batch, *tensors: Tensor, **choices: Any) -> Any:
        *terms, _ = self.terms(batch, *tensors)
        groups, repeats = tensors[0].shape[2:], tensors[2].shape[2] // tensors[0].shape[2]
        repeated = {tensor.data_ptr() for tensor in terms[:2] if tensor is not None}

        # B and C are saved once for each group
        def pack(tensor: Tensor) -> Tensor:
            return tensor[:, :, ::repeats].clone() if tensor.data_ptr() in repeated else tensor

        def unpack(tensor: Tensor) -> Tensor:
            return tensor.repeat_interleave(repeats, 2) if tensor.shape[2:] == groups else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return fla_kernel("ops.simple_gla:chunk_simple_gla", batch)(
                *terms, scale=1.0, **choices
            )

    def finished(self, out: Tensor, values: Tensor, batch: Batch | None) -> Tensor:
        own = self.D if batch is None else batch.own_heads(self.D)
        return (out + own[:, None] * values).to(values.dtype)

    def branch(self, out: Tensor, x: Tensor | None) -> Any:
        groups, eps = self.part.options["groups"], self.part.model.norm_eps
        out, gate = out.flatten(2), self.gate(x).to(out.dtype)
        if out.is_cuda:
            kernel = fla_kernel("modules.norm.layernorm_gated:rmsnorm_fn")
            return self.out(kernel(out, self.norm, None, gate, eps, out.shape[2] // groups, False))
        product = (widened(out) * F.silu(widened(gate))).unflatten(-1, (groups, -1))
        normed = F.rms_norm(product, product.shape[-1:], eps=eps).flatten(-2)
        return self.out((normed * self.norm).to(out.dtype))


register("mamba2", Mamba2)
