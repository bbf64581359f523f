"""One transformer block: x + attention(norm(x)), then x + mlp(norm(x)), with RMSNorm, grouped-query
attention and SwiGLU; or LayerNorm, an MLP without gate, and the two branches side by side.

q, k and v come from one projection, gate and up from another. Their rows are [q; k; v] and
[gate; up], so that they split into the tensors of a Llama checkpoint. If a kernel of ours serves a
tensor (`fused`), a layer calls it; the lines beside it are the formula.

Shapes: B sequences, T tokens, hidden size C, H query heads, Hkv key-value heads, head size D.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longctx.attention import Attention, Mask, Scores
from longctx.attention.description import AttentionConfig
from longctx.kernels import HAS_TRITON, linear
from longctx.model.offload import Away, present
from longctx.model.rope import Angles, rotate
from longctx.spec import parts

if HAS_TRITON:
    from longctx.kernels import rms_norm, rotary, swiglu


HALVES = torch.bfloat16, torch.float16
FLOATS = *HALVES, torch.float32


def fused(x: Tensor, dtypes: Collection[torch.dtype] = HALVES) -> bool:
    """Return True if our kernels serve x: `dtypes` on a GPU, in Triton's interpreter not fp64."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return x.dtype != torch.float64
    return x.is_cuda and x.dtype in dtypes and HAS_TRITON


class Linear(nn.Linear):
    """x Wᵀ + b; 16-bit inputs give fp32 weights their gradient, on a GPU unrounded."""

    experts = 1  # whose weights are stacked by rows; `longctx.model.experts` multiplies them
    added: ClassVar[tuple[Any, ...]] = (None, None, 0.0)  # A, B and factor of LoRA there

    def __init__(self, inputs: int, outputs: int, bias: bool = True, device: Any = None) -> None:
        super().__init__(inputs, outputs, bias, device)
        self.product: Any = linear  # or in FP8, see longctx.model.fp8

    @classmethod
    def like(cls, other: Any, product: Any = linear) -> Self:
        layer = cls(other.in_features, other.out_features, bias=False, device="meta")
        layer.weight, layer.bias, layer.product = other.weight, other.bias, product
        layer.experts = getattr(other, "experts", 1)  # of transformers' layers one
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def linears(part: parts.Part) -> list[Linear]:
    return [Linear(layer.columns, layer.outputs, layer.has_bias) for layer in part.linears]


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · factor, computed in fp32 and returned in x's dtype."""

    eps: Any

    def __init__(self, size: int, eps: float, plus_one: bool) -> None:
        super().__init__(size, eps)
        self.plus_one = plus_one

    @property
    def factor(self) -> Tensor:
        """Return the weight, or 1 + weight: in 16 bits a small one has digits that 1 would take."""
        if not self.plus_one:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + 1

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.factor, self.eps)


def normed(x: Tensor, weight: Tensor, eps: Any) -> Tensor:
    """Return x / rms(x) · weight, computed in the wider of their dtypes."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


def normed_heads(x: Tensor, norm: Any) -> Any:
    """Return x (B, T, H, D) normed, every head alone or all together."""
    return norm(x.flatten(2).unflatten(2, (-1, *norm.normalized_shape))).reshape(x.shape)


class StreamNorm(RMSNorm):
    """A norm of the residual stream; RMSNorm is one kernel each way on a GPU."""

    def __init__(self, part: parts.Norm) -> None:
        super().__init__(part.size, part.eps, part.plus_one)
        self.form = part.form
        self.weight.requires_grad_(self.form != "factor")
        self.bias = nn.Parameter(torch.zeros(part.size)) if part.form == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "factor":
            return x * self.weight.to(x.dtype)
        if self.form != "rms":
            # As torch does, but its result has x's dtype
            wide = torch.promote_types(x.dtype, self.weight.dtype)
            bias = None if self.bias is None else self.bias.to(wide)
            factor = self.factor.to(wide)
            return F.layer_norm(x.to(wide), factor.shape, factor, bias, self.eps).to(x.dtype)
        return rms_norm.norm(x, self.factor, self.eps) if fused(x) else super().forward(x)

    def add_and_norm(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the residual stream x (..., C) plus `branch`, if any, and the norm of the sum."""
        # On a GPU both, and the sum of their gradients in backward, are one pass over memory
        if fused(x) and self.form == "rms":
            return rms_norm.add_and_norm(x, branch, self.factor, self.eps)
        x = x if branch is None else x + branch
        return x, self(x)


class NoNorm(nn.Identity):
    """The place of a StreamNorm that a block does not have."""

    form = "none"
    add_and_norm: Any = StreamNorm.add_and_norm


def optional(part: parts.Part | None) -> nn.Module:
    """Return a new module of `part`, or one that changes nothing."""
    return NoNorm() if part is None else part.build()


class SelfAttention(nn.Module):
    """Grouped-query attention by the chosen backend, with rotary positions if `part.rotates`."""

    reads_input = False  # True if `branch` takes attention's input
    cached: ClassVar[slice | None] = slice(1, 3)  # decoding keeps keys and values

    def __init__(self, part: parts.AttentionSpec, backend: AttentionConfig) -> None:
        super().__init__()
        model = part.model
        self.heads, self.kv_heads, self.head_dim = model.heads, model.kv_heads, model.head_size
        self.rotates, self.kinds = part.rotates, len(part.linears[0].rows)  # 2 if v is k
        self.attend = Attention(backend.backend, backend.options)
        self.qkv, self.out, *gates = linears(part)
        self.gate = gates[0] if gates else None
        self.eps, plus_one, self.norms_v = model.norm_eps, model.norm_plus_one, model.v_norm
        norms: list[nn.Module] = [RMSNorm(n, self.eps, plus_one) for n in part.norms]
        self.q_norm, self.k_norm = norms or [nn.Identity(), nn.Identity()]
        self.qk_normed = "" if not norms else "after" if model.qk_norm_after_rope else "before"
        self.scale, self.softcap = model.attention_scale, model.softcap
        self.reads_input |= self.gate is not None
        self.sinks = nn.Parameter(torch.zeros(model.heads)) if model.sinks else None

    @property
    def scores(self) -> Scores:
        """Return how its logits are made; the sinks are those of now."""
        return Scores(self.scale, self.softcap, self.sinks)

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor, growth: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, H, D), k and v (B, T, Hkv, D) of x (B, T, C): q, k normed and rotated."""
        qkv = self.qkv(x)
        is_plain = self.kinds == 3 and not (self.qk_normed == "before" or self.norms_v)
        if self.rotates and 2 * cos.shape[-1] == self.head_dim and is_plain and fused(qkv):
            q, k, v = rotary.rotated(qkv, cos, sin, self.heads, self.kv_heads)
        else:
            heads = (self.heads, self.kv_heads, self.kv_heads)[: self.kinds]
            q, *others = qkv.unflatten(-1, (-1, self.head_dim)).split(heads, dim=2)
            k, v = others[0], others[-1]
            if self.norms_v:
                v = normed(v, torch.ones(self.head_dim, device=v.device), self.eps)
            if self.qk_normed == "before":
                q, k = normed_heads(q, self.q_norm), normed_heads(k, self.k_norm)
            if self.rotates:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.qk_normed == "after":
            q, k = normed_heads(q, self.q_norm), normed_heads(k, self.k_norm)
        return q if growth is None else (q * growth).to(q.dtype), k, v

    def branch(self, out: Tensor, x: Tensor | None) -> Tensor:
        """Return what the output (B, T, H, D) adds to the stream; a gate is made of the input x."""
        if self.gate is not None:
            assert x is not None
            gate = torch.sigmoid(self.gate(x)).unflatten(-1, (self.heads, -1))
            out = out * gate.to(out.dtype)
        return self.out(out.flatten(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Return attention's output, (B, T, H, D), before its projection."""
        return self.attend(q, k, v, mask, self.scores)


ACTIVATIONS: dict[str, Any] = {"silu": F.silu, "gelu": F.gelu, "relu2": lambda x: F.relu(x) ** 2}
ACTIVATIONS |= {"gelu_tanh": partial(F.gelu, approximate="tanh")}


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), arXiv 2002.05202; with other activations, or without a gate."""

    def __init__(self, part: parts.FeedForward) -> None:
        super().__init__()
        self.gate_up, self.down = linears(part)
        self.activation, self.has_gate = part.activation, part.has_gate

    def forward(self, x: Tensor, needs_value: bool = True) -> Tensor:
        """Return (B, T, C), of x (B, T, C); without `needs_value` maybe 0, with right gradients."""
        gate_up, down = self.gate_up(x), self.down
        activate = ACTIVATIONS[self.activation]
        if not self.has_gate:
            return down(activate(gate_up))
        is_fused = down.product is linear or hasattr(down.product, "gated_down")
        if fused(gate_up) and type(down) is Linear and is_fused:
            gated_down = swiglu.gated_down if down.product is linear else down.product.gated_down
            return gated_down(gate_up, down.weight, down.bias, needs_value, self.activation)
        gate, up = gate_up.chunk(2, dim=-1)
        return down(activate(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), of x (B, T, C); or both of one x.

    Only attention, or another mixer in its place, mixes tokens. So a block is also before →
    attention → after. `before` and `after` can run on any slice of the tokens, see
    `longctx.model.recompute`.
    """

    def __init__(self, described: parts.BlockSpec, backend: AttentionConfig) -> None:
        super().__init__()
        self.attention_norm: Any = optional(described.attention_norm)
        self.attention = described.attention.build(backend.of_window(described.attention.window))
        self.attention_out_norm = optional(described.attention_out_norm)
        self.mlp_norm: Any = optional(described.mlp_norm)
        self.mlp = described.mlp.build() if described.mlp.inner else None
        self.mlp_out_norm = optional(described.mlp_out_norm)
        self.out_factor = optional(described.out_factor)
        self.mlp_scale, self.branch_scale = described.mlp_scale, described.branch_scale
        self.is_parallel, self.shares_norm = described.is_parallel, described.shares_norm
        self.reads_normed = self.attention.reads_input or self.shares_norm
        # The gradient of a norm needs its input, so the MLP's value is computed for it.
        self.always_needs_value = described.mlp_out_norm is not None

    away = Away({}, torch.device("cpu"))  # weights that are in host memory between calls

    def unshard(self) -> None:
        """Do nothing: the weights are whole. torch's fully_shard puts its own method first."""

    def calling(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Call function(self, *arguments) as a forward, with weights gathered or from the host."""
        with present(self.away, self.away.following):
            return function(self, *arguments)

    def scaled(self, branch: Tensor) -> Tensor:
        """Return what a branch adds to the residual stream."""
        return branch if self.branch_scale == 1 else branch * self.branch_scale

    def before(self, x: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v of the block's input, or the tensors that its mixer takes."""
        return self.attention.project(self.attention_norm(x), *angles)

    def after(self, x: Tensor, out: Tensor, needs_value: bool = True, normed: Any = None) -> Tensor:
        """Return the block's output, from its input and attention's output (B, T, H, D)."""
        # A gate, or an MLP with the same norm, reads `normed`, made again if it is missing
        if self.reads_normed and normed is None:
            normed = self.attention_norm(x)
        branch = self.attention.branch(out, normed)
        if branch.shape != x.shape:  # the sum would broadcast; attention's never differs
            self.attention.part.check_shape("forward and branch return", branch, x.shape)
        branch = self.scaled(self.attention_out_norm(branch))
        if self.is_parallel:
            normed = normed if self.shares_norm else self.mlp_norm(x)
            x = x + branch
        else:
            x, normed = self.mlp_norm.add_and_norm(x, branch)
        if self.mlp is None:
            return self.out_factor(x)
        normed = normed if self.mlp_scale == 1 else normed * self.mlp_scale
        branch = self.mlp_out_norm(self.mlp(normed, needs_value or self.always_needs_value))
        return self.out_factor(x + self.scaled(branch))

    def forward(self, x: Tensor, angles: Angles, mask: Any) -> Tensor:
        x, normed = self.attention_norm.add_and_norm(x)
        # While the MLP computes no name holds q, k and v, or an input that it does not read
        out = self.attention(*self.attention.project(normed, *angles), mask)
        normed = normed if self.reads_normed else None
        return self.after(x, out, normed=normed)
