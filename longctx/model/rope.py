"""Rotary position embedding (arXiv 2104.09864), half-split as in Hugging Face: channel d rotates
with channel d + D/2.

cos and sin are computed once per forward from the positions. The angle, an integer times a 24-bit
frequency, is exact in fp64; in fp32 it would be off by 0.03 rad at position 1,000,000.

Scaled frequencies equal transformers' to the last bit, so that a model means the same there: linear
(arXiv 2306.15595), dynamic NTK-aware, YaRN (arXiv 2309.00071), llama3 (arXiv 2407.21783), longrope
(arXiv 2402.13753). dynamic and longrope depend on the length of the input: that is each document,
or the piece of it in a row, whatever else is packed there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longctx.config.rope_config import ORIGINAL, SHARE
from longctx.spec import parts

Angles = tuple[Tensor, ...]  # cos, sin and, if queries grow, their factor


class Rope(nn.Module):
    """cos and sin for every token, from its position in its document."""

    def __init__(self, spec: parts.RopeSpec) -> None:
        super().__init__()
        self.spec = spec
        # (D/2,), no buffer: a model cast to bf16 keeps it in fp32
        self.frequencies, self.attention_factor = frequencies(spec)
        # These frequencies depend on the length of the document
        self.follows_length = spec.scaling.get("rope_type") in ("dynamic", "longrope")

    def of_documents(self, lengths: Sequence[int], longest: int) -> tuple[Tensor, Tensor]:
        """Return frequencies (n, D/2) fp32, and the number of each token's own, (tokens,) int64, in
        documents of these `lengths`, on the CPU. No document counts as longer than `longest`.
        """
        each = torch.tensor(lengths, device="cpu")
        different, number = each.clamp(max=longest).unique(return_inverse=True)
        table = [frequencies(self.spec, length)[0] for length in different.tolist()]
        return torch.stack(table), number.repeat_interleave(each)

    def forward(self, positions: Tensor, own_frequencies: Tensor | None = None) -> Angles:
        """Return fp32 cos, sin (B, T, 1, D/2) of positions (B, T), factors of queries (B, T, 1, 1).

        `own_frequencies` (B, T, D/2): those of each token, if its document's length decides.
        """
        self.frequencies = self.frequencies.to(positions.device)
        per_token = self.frequencies if own_frequencies is None else own_frequencies[..., None, :]
        angles = positions[..., None, None].double() * per_token.double()
        cos, sin = (x.float() * self.attention_factor for x in (angles.cos(), angles.sin()))
        if not self.spec.growth:
            return cos, sin
        beta, tokens = self.spec.growth
        steps = (positions[..., None, None] / tokens).floor().float()
        return cos, sin, 1 + beta * steps.log1p()


class Ropes(nn.ModuleList):
    """The ropes of a model's layers, each once however many layers share it."""

    def __init__(self, layers: Sequence[parts.RopeSpec]) -> None:
        different = [rope for n, rope in enumerate(layers) if rope not in layers[:n]]
        super().__init__(map(Rope, different))
        self.of_layer = [different.index(rope) for rope in layers]

    def per_layer(self, angles: Callable[[Any], Angles]) -> list[Angles]:
        """Return the `angles` of each layer's rope; they are computed once per rope."""
        each = [angles(rope) for rope in self]
        return [each[n] for n in self.of_layer]


def frequencies(spec: parts.RopeSpec, length: int | None = None) -> tuple[Tensor, float]:
    """Return (D/2,) fp32 radians per position on the CPU, and the factor on cos and sin: those for
    an input of `length` tokens, if the scaling depends on it.
    """
    size, scaling = spec.size, spec.scaling
    kind = scaling.get("rope_type", "default")
    theta = _dynamic_base(spec, length) if kind == "dynamic" else spec.theta
    periods = theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
    plain = 1.0 / periods
    if kind in ("linear", "proportional"):
        rotated = int(scaling.get(SHARE, 1.0) * size // 2)
        plain.div_(scaling.get("factor", 1.0))[rotated:] = 0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(periods, spec)
    return _longrope(periods, spec, length) if kind == "longrope" else (plain, 1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of x (B, T, H, D) by its token's angles; channels without one stay."""
    size = 2 * cos.shape[-1]
    x1, x2 = x[..., :size].chunk(2, dim=-1)
    rest = () if size == x.shape[-1] else (x[..., size:],)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, *rest), dim=-1).to(x.dtype)


def _dynamic_base(spec: parts.RopeSpec, length: int | None) -> Any:
    """Return the base, which grows with inputs longer than the model's context."""
    context, factor = spec.context, spec.scaling["factor"]
    assert context is not None
    positions: Any = context
    if length is not None and length > context:
        # A tensor: in fp32 from here on, as in transformers, or the last bit differs
        positions = torch.tensor(length, device="cpu")
    growth = (factor * positions / context) - (factor - 1)
    return spec.theta * growth ** (spec.size / (spec.size - 2))


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Return high frequencies as they are, low ones over the factor, smoothly in between."""
    factor, old = scaling["factor"], scaling[ORIGINAL]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((old / (2 * math.pi / plain) - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(periods: Tensor, spec: parts.RopeSpec) -> tuple[Tensor, float]:
    """Divide frequencies with few rotations in the original length by the factor, keep others."""
    scaling = spec.scaling
    old, stated = scaling[ORIGINAL], scaling.get("factor")
    factor: float = (spec.context or old) / old if stated is None else stated

    def channel(rotations: float) -> float:
        return (spec.size * math.log(old / (rotations * 2 * math.pi))) / (2 * math.log(spec.theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.size - 1)
    high = high + 0.001 if low == high else high
    channels = torch.arange(len(periods), dtype=torch.float32, device="cpu")
    ramp = torch.clamp((channels - low) / (high - low), 0, 1)
    plain = 1 - ramp
    mixed = 1.0 / (factor * periods) * (1 - plain) + 1.0 / periods * plain
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = yarn_scale(factor)
        if mscale and all_dim:
            attention_factor = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    return mixed, float(attention_factor)


def yarn_scale(factor: float, mscale: float = 1) -> float:
    """Return YaRN's factor of queries and keys whose positions are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(periods: Tensor, spec: parts.RopeSpec, length: int | None) -> tuple[Tensor, float]:
    """Return each frequency over a factor of its own, found by search."""
    # One set of factors serves inputs up to the original length, another one longer inputs
    scaling, old = spec.scaling, spec.scaling[ORIGINAL]
    factor, attention_factor = scaling.get("factor"), scaling.get("attention_factor")
    assert spec.context is not None
    factor = spec.context / old if factor is None else factor
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(old))
    factors = scaling["long_factor" if length is not None and length > old else "short_factor"]
    divisors = torch.tensor(factors, dtype=torch.float32, device="cpu")
    return 1.0 / (divisors * periods), float(attention_factor)
