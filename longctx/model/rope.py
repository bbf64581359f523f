"""Rotary position embedding (arXiv 2104.09864), half-split as in Hugging Face: channel d turns with
channel d + D/2.

No table bound to a maximum length: cos and sin are computed once per forward from the positions
themselves. The angle, an integer times a 24-bit frequency, is formed in fp64, where the product is
exact; in fp32 it would be off by 0.03 rad at position 1,000,000.

Stretched frequencies are transformers' to the last bit, so that a model means the same there:
linear (arXiv
2306.15595), dynamic NTK-aware, YaRN (arXiv 2309.00071), llama3 (arXiv 2407.21783), longrope (arXiv
2402.13753). Two of them depend on the length of the input: it is that of the row, of whatever
documents the row is packed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Rope(nn.Module):
    """cos and sin for every token, from its position in its document.

    `scaling` is transformers' rope_parameters (see `GPTConfig.rope_scaling`), `context` its
    max_position_embeddings.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None = None,
        context: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling, self.context = (
            head_dim,
            theta,
            dict(scaling or {}),
            context,
        )
        self.of_length: int | None = None
        # (D/2,), no buffer: a model cast to bf16 keeps it in fp32
        self.frequencies, self.attention_factor = frequencies(
            head_dim, theta, self.scaling, context
        )

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (B, T) → cos, sin (B, T, 1, D/2) in fp32."""
        self._follow_length(positions.shape[-1])
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None, None].double() * self.frequencies.double()
        cos, sin = angles.cos().float(), angles.sin().float()
        return (
            (cos, sin)
            if self.attention_factor == 1
            else (cos * self.attention_factor, sin * self.attention_factor)
        )

    def _follow_length(self, length: int) -> None:
        if self.scaling.get("rope_type") in ("dynamic", "longrope") and length != self.of_length:
            self.of_length = length
            self.frequencies, _ = frequencies(
                self.head_dim, self.theta, self.scaling, self.context, length
            )


def frequencies(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any],
    context: int | None = None,
    length: int | None = None,
) -> tuple[Tensor, float]:
    """(D/2,) fp32 radians per position on the CPU, and the factor on cos and sin, for an input of
    `length` tokens.
    """
    kind = scaling.get("rope_type", "default")
    if kind == "dynamic":
        theta = _dynamic_base(head_dim, theta, scaling["factor"], context, length)
    turns = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if kind == "linear":
        return (1.0 / turns).div_(scaling["factor"]), 1.0
    if kind == "llama3":
        return _llama3(1.0 / turns, scaling), 1.0
    if kind == "yarn":
        return _yarn(turns, theta, scaling, context)
    if kind == "longrope":
        return _longrope(turns, scaling, context, length)
    return 1.0 / turns, 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of x (B, T, H, D) by its token's angles, in fp32 or x's own precision if that
    is higher.
    """
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def _dynamic_base(
    head_dim: int, theta: float, factor: float, context: int | None, length: int | None
) -> Any:
    """The base grows with what the input has more than the `context` that the model was made for."""
    assert context is not None
    seen: Any = context
    if length is not None and length > context:
        seen = torch.tensor(length, device="cpu")  # in fp32 from here on, as in transformers
    return theta * ((factor * seen / context) - (factor - 1)) ** (head_dim / (head_dim - 2))


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """High frequencies as they are, low ones divided by the factor, a smooth passage between the
    two.
    """
    factor, old = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > old / low, plain / factor, plain)
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where(~(wavelength < old / high) * ~(wavelength > old / low), between, stretched)


def _yarn(
    turns: Tensor, theta: float, scaling: Mapping[str, Any], context: int | None
) -> tuple[Tensor, float]:
    """Frequencies that turn often within the original length as they are, those that hardly turn
    divided by the factor.
    """
    old, given = scaling["original_max_position_embeddings"], scaling.get("factor")
    factor: float = (context or old) / old if given is None else given
    dim, half = 2 * len(turns), len(turns)

    def channel(rotations: float) -> float:
        return (dim * math.log(old / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = torch.clamp(
        (torch.arange(half, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1
    )
    plain = 1 - ramp
    return 1.0 / (factor * turns) * (1 - plain) + 1.0 / turns * plain, _yarn_attention_factor(
        scaling, factor
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return float(scale(mscale) / scale(all_dim)) if mscale and all_dim else scale(1)


def _longrope(
    turns: Tensor, scaling: Mapping[str, Any], context: int | None, length: int | None
) -> tuple[Tensor, float]:
    """Each frequency divided by a factor of its own, found by search: one set up to the original
    length, one beyond.
    """
    old, factor, chosen = (
        scaling.get(x) for x in ("original_max_position_embeddings", "factor", "attention_factor")
    )
    assert old is not None and context is not None
    factor = context / old if factor is None else factor
    if chosen is None:
        chosen = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(old))
    factors = scaling["long_factor" if length is not None and length > old else "short_factor"]
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * turns), float(chosen)
