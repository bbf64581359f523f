"""Multi-head latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): keys and values
of all heads are made of one latent c of a token, and a key has rotary channels r for all heads.

    c = norm(W x),  r = rope(R x),   k_h = [r, K_h c],  v_h = V_h c,
    q_h = [rope(P_h y), Q_h y],  y = x, or norm(D x) with a q_rank

K_h has model.head_dim channels, r their rotary share: DeepSeek has 128 and 64. Decoding caches c
and r alone, since K_h and V_h commute with the sums:

    q_h·k_h = [rope(P_h y), K_hᵀ Q_h y]·[r, c],   Σ p v_h = V_h Σ p c
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longctx.attention import Attention, Mask, Scores
from longctx.attention.description import AttentionConfig
from longctx.model.layers import normed
from longctx.model.mixer import Mixer
from longctx.model.mixers.description import Cost, MixerSpec, register
from longctx.model.rope import rotate, yarn_scale


def sizes(spec: MixerSpec) -> tuple[int, int, int]:
    """Return q_rank, kv_rank, and the channels of a value."""
    given, size = spec.options, spec.model.head_size
    return given["q_rank"], given["kv_rank"] or 4 * size, given["value_size"] or size


class LatentAttention(Mixer):
    """Latent attention; with 0 kv_rank is 4 · model.head_dim, value_size that, and q is direct."""

    options = {"kv_rank": 0, "q_rank": 0, "value_size": 0}
    share = "heads"
    softmax_calls = 1
    capturable = True
    cached = slice(3, 4)
    lacks = ("qkv_bias", "out_bias", "sinks", "softcap", "qk_norm", "attention_gate")

    def __init__(self, part: MixerSpec, backend: AttentionConfig) -> None:
        super().__init__(part, backend)
        self.attend = Attention(backend.backend, backend.options)
        model, scaling, (_, self.kv_rank, value_size) = part.model, part.rope.scaling, sizes(part)
        self.of_key = part.rope.size, model.head_size
        self.of_latent = model.head_size, value_size
        # With mscale_all_dim YaRN stretches all channels of a key, not the rotary ones alone
        stretch = yarn_scale(scaling.get("factor", 1.0), scaling.get("mscale_all_dim") or 0.0)
        self.scores = Scores((model.attention_scale or sum(self.of_key) ** -0.5) * stretch**2)

    @classmethod
    def problem(cls, spec: MixerSpec) -> str | None:
        # Kernels have one size of heads, so values are padded to that of keys
        limit = spec.softmax.model.head_size
        fits = min(given := sizes(spec)) >= 0 and given[2] <= limit
        rule = f"give ranks from 1, and value_size up to {limit}, the size of a key"
        return super().problem(spec) if fits else f"q_rank, kv_rank, value_size={given}: {rule}"

    @classmethod
    def called(cls, spec: MixerSpec) -> dict[str, Any]:
        return {"head_dim": spec.model.head_size + spec.rope.size, "kv_heads": spec.model.heads}

    @classmethod
    def weights(cls, spec: MixerSpec) -> dict[str, tuple[Any, ...]]:
        (q_rank, kv_rank, value_size), heads = sizes(spec), spec.model.heads
        queries = spec.softmax.query_size
        shapes: dict[str, tuple[Any, ...]] = {
            "qkv": ((q_rank or queries, kv_rank + spec.rope.size), spec.size),
            "kv_up": (heads * (spec.model.head_size + value_size), kv_rank),
            "out": (spec.size, heads * value_size),
            "kv_norm": (kv_rank,),
        }
        return shapes | ({"q_up": (queries, q_rank), "q_norm": (q_rank,)} if q_rank else {})

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        (q_rank, kv_rank, _), queries = sizes(spec), spec.softmax.query_size
        # Latents in fp32, and normed, and the output for `out`; but no projection of q, k and v
        saved = (e + 4) * (q_rank + kv_rank) + e * (spec.query_size - 2 * queries)
        return Cost(saved=saved, backward=e * queries)  # the gradient of the padded output

    def project(self, x: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        """Return q and k (B, T, H, D), v (B, T, H, V), and [r, c] (B, T, 1, ...)."""
        widths = self.part.shapes["qkv"][0][0], self.kv_rank, self.of_key[0]
        queries, c, r = self.qkv(x).split(widths, dim=-1)
        if "q_norm" in self.part.shapes:
            queries = self.q_up(normed(queries, self.q_norm, 1e-6))
        c, r = normed(c, self.kv_norm, 1e-6), r[:, :, None]  # whatever eps the model has
        # Rotary channels first, as `rotate` has them
        queries = queries.unflatten(-1, (-1, sum(self.of_key))).roll(self.of_key[0], dims=-1)
        keys, values = self.keys_and_values(c)
        cos, sin, *growth = angles
        if self.part.rotates:
            queries, r = rotate(queries, cos, sin), rotate(r, cos, sin)
        queries = (queries * growth[0]).to(queries.dtype) if growth else queries
        keys = torch.cat([r.expand(*keys.shape[:3], -1), keys], dim=-1)
        return queries, keys, values, torch.cat([r, c[:, :, None]], dim=-1)

    def keys_and_values(self, latents: Tensor) -> Any:
        """Return k without its rotary channels, and v, (..., H, D), of latents (..., kv_rank)."""
        both = self.kv_up(latents).unflatten(-1, (-1, sum(self.of_latent)))
        return both.split(self.of_latent, dim=-1)

    def __call__(self, *arguments: Any) -> Tensor:
        queries, keys, values, _, batch = arguments
        return super().__call__(queries, keys, values, batch)

    def forward(self, *tensors: Any) -> Tensor:
        queries, keys, values, batch = tensors
        padded = pad(values, (0, keys.shape[3] - values.shape[3]))
        out = self.attend(queries, keys, padded, batch.mask, self.scores)
        return out[..., : values.shape[3]]

    def branch(self, out: Tensor, x: Tensor | None) -> Any:
        return self.out(out.flatten(2))

    def absorbed(self, queries: Tensor, latents: Tensor, mask: Mask) -> Tensor:
        """Return the output (B, T, H, V) of q and [r, c] (B, S, 1, ...), the key of all heads."""
        # Of the identity the layer makes its weight, in any format and with what LoRA adds
        identity = torch.eye(self.kv_rank, dtype=queries.dtype, device=queries.device)
        K, V = self.keys_and_values(identity)
        rotary, plain = queries.split(self.of_key, dim=-1)
        asked = torch.cat([rotary, torch.einsum("bthd,chd->bthc", plain, K)], dim=-1)
        summed = Attention("naive", {}).decode(asked, latents, latents, mask, self.scores)
        return torch.einsum("bthc,chv->bthv", summed[..., self.of_key[0] :], V)

    def naive(self, *tensors: Any) -> Tensor:
        return self.absorbed(tensors[0], tensors[3], tensors[4].mask)

    def step(self, *tensors: Any) -> Tensor:
        return self.absorbed(tensors[0], *tensors[4:])


register("mla", LatentAttention)
