"""One transformer block: RMSNorm, grouped-query self-attention, RMSNorm, SwiGLU, each half added to
the residual stream.

Shapes: B rows, T tokens, C channels, H query heads, Hkv key-value heads, D channels per head. q, k,
v come from one projection and gate and up from another; their rows are [q; k; v] and [gate; up], so
that they split into the tensors of a Llama checkpoint.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longctx.attention import Attention, Mask
from longctx.config.model_config import AttentionConfig, GPTConfig
from longctx.kernels import HAS_TRITON
from longctx.kernels.linear import linear
from longctx.model.rope import rotate


def fused(x: Tensor) -> bool:
    """Whether our own kernel serves x: 16 bits on a GPU, and any but fp64 in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return x.dtype != torch.float64
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and HAS_TRITON


class Linear(nn.Linear):
    """x Wᵀ + b, where 16-bit inputs give fp32 weights their gradient, on a GPU unrounded."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight, computed in fp32 and returned in x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(
            x.dtype, self.weight.dtype
        )  # of a 16-bit stream and 32-bit weights: 32 bits
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(
            x.dtype
        )


class StreamNorm(RMSNorm):
    """An RMSNorm of the residual stream, by one kernel each way on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not fused(x):
            return super().forward(x)
        from longctx.kernels.rms_norm import norm

        assert self.eps is not None
        return norm(x, self.weight, self.eps)

    def onward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (..., C), `branch` added to it where there is one, as it goes on, and its norm; their
        gradients meet in backward.
        """
        if not fused(x):
            x = x if branch is None else x + branch
            return x, super().forward(x)
        from longctx.kernels.rms_norm import add_and_norm

        assert self.eps is not None
        return add_and_norm(x, branch, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Rotary grouped-query attention by the chosen backend; without the rotation where `rotary` is
    false.
    """

    def __init__(self, config: GPTConfig, chosen: AttentionConfig, rotary: bool = True) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_size
        self.rotary = rotary
        self.attend = Attention(chosen.backend, chosen.options)
        self.qkv = Linear(
            config.channels, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.qkv_bias
        )
        self.out = Linear(self.heads * self.head_dim, config.channels, bias=config.out_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) → q (B, T, H, D), k and v (B, T, Hkv, D), q and k rotated by their positions
        if `rotary`.
        """
        qkv = self.qkv(x)
        if self.rotary and isinstance(self.q_norm, nn.Identity) and fused(qkv):
            from longctx.kernels.rotary import rotated

            return rotated(qkv, cos, sin, self.heads, self.kv_heads)
        heads = self.heads, self.kv_heads, self.kv_heads
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(heads, dim=2)
        q, k = self.q_norm(q), self.k_norm(k)
        return (rotate(q, cos, sin), rotate(k, cos, sin), v) if self.rotary else (q, k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """What each token gathers, (B, T, H, D)."""
        return self.attend(q, k, v, mask)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), arXiv 2002.05202."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.channels, 2 * config.ffn, bias=config.mlp_bias)
        self.down = Linear(config.ffn, config.channels, bias=config.mlp_bias)

    def forward(self, x: Tensor, valued: bool = True) -> Tensor:
        """Unless `valued` the result may be 0, and only its gradients are right."""
        gate_up = self.gate_up(x)
        if fused(gate_up) and type(self.down) is Linear:
            from longctx.kernels.swiglu import gated_down

            return gated_down(gate_up, self.down.weight, self.down.bias, valued)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x is (B, T, C). Only attention mixes tokens."""

    def __init__(self, config: GPTConfig, chosen: AttentionConfig, rotary: bool = True) -> None:
        super().__init__()
        self.attention_norm = StreamNorm(config.channels, config.norm_eps)
        self.attention = SelfAttention(config, chosen, rotary)
        self.mlp_norm = StreamNorm(config.channels, config.norm_eps)
        self.mlp = SwiGLU(config)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the block's input; each token by itself."""
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after(self, x: Tensor, out: Tensor, valued: bool = True) -> Tensor:
        """The block's output from its input and attention's output (B, T, H, D); each token by
        itself.

        Unless `valued`, only its gradients are right: for those who know the output and want its
        graph again.
        """
        x, normed = self.mlp_norm.onward(x, self.attention.out(out.flatten(2)))
        return x + self.mlp(normed, valued)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        x, normed = self.attention_norm.onward(x)
        return self.after(x, self.attention(*self.attention.project(normed, cos, sin), mask))
