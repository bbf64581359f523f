"""A transformer block: its parts in order, and what they cost together. Torch-free.

Letters as in parts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from longctx.spec.parts import FP32, AttentionSpec, FeedForward, LinearSpec, Norm, Part, Pass

MLP, ATTENTION = "mlp", "attention"  # the halves of a block's backward, in their order


class Kept(NamedTuple):
    """Bytes that forward leaves for backward, and the half of it that frees them."""

    bytes: float
    until: str  # MLP | ATTENTION


@dataclass(frozen=True)
class BlockSpec:
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)); norms may be missing."""

    attention_norm: Norm | None
    attention: AttentionSpec
    mlp_norm: Norm | None
    mlp: FeedForward
    branch_scale: float = 1.0  # factor of what attention and MLP add to the residual stream
    # of what attention and MLP add to the residual stream, if it is normalized
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None

    def parts(self) -> tuple[Part, ...]:
        """Return the parts in the order in which they compute."""
        of_attention = self.attention_norm, self.attention, self.attention_out_norm
        of_mlp = self.mlp_norm, self.mlp, self.mlp_out_norm
        return tuple(part for part in (*of_attention, *of_mlp) if part is not None)

    @cached_property
    def linears(self) -> dict[str, LinearSpec]:
        """Every linear layer by the path of its module in the block."""
        return {
            f"{part.name}.{linear.name}": linear for part in self.parts() for linear in part.linears
        }

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(part.parameters for part in self.parts())

    @cached_property
    def weights(self) -> int:
        """Weights of all linear layers."""
        return sum(linear.weights for linear in self.linears.values())

    @cached_property
    def multiplied(self) -> int:
        """Weights that multiply each token."""
        return sum(part.multiplied for part in self.parts())

    @cached_property
    def packed(self) -> list[LinearSpec]:
        """Linear layers whose frozen weights are in the format lora.base."""
        return [linear for linear in self.linears.values() if linear.packs]

    def weight_bytes(self, base: str | None, each: int) -> int:
        """Return the bytes of its weights, with `each` of one that is not packed as `base`."""
        if base is None:
            return each * self.weights
        saved = [each * linear.weights - linear.packed_bytes for linear in self.packed]
        return each * self.weights - sum(saved)

    @cached_property
    def weights_after(self) -> int:
        """Weights of the linear layers after attention, where recompute=mlp begins."""
        return self.weights - self.attention.linears[0].weights

    def saved(self, p: Pass, keeps_input: bool = True) -> float:
        """Return the bytes that the block saves for backward."""
        return sum(kept.bytes for kept in self.kept(p, keeps_input))

    def freed_after_mlp(self, p: Pass) -> float:
        """Return the saved bytes that are freed before attention's backward."""
        return sum(kept.bytes for kept in self.kept(p) if kept.until == MLP)

    def kept(self, p: Pass, keeps_input: bool = True) -> Iterator[Kept]:
        """Yield what the block saves for backward, and until which half of it."""
        e, C = p.activation, self.mlp.size
        if p.recompute == "block":
            if keeps_input:
                yield Kept(e * C * p.tokens, ATTENTION)
            yield Kept(self.attention.saved_output(p), ATTENTION)
            return
        # A product saves its input: without a norm the stream itself, or its copy in FP8
        reads_stream = self.attention_norm is None
        if not (reads_stream and p.fp8_input and p.recompute == "none"):
            yield Kept(e * C * p.tokens, ATTENTION)
        if self.attention_norm is not None:
            yield Kept(self.attention_norm.saved(p), ATTENTION)
        elif p.fp8_input:
            yield Kept(p.fp8_input * C * p.tokens, ATTENTION)
        yield Kept(self.attention.saved(p), ATTENTION)
        if p.recompute == "none":
            yield from self.kept_after(p)

    def kept_after(self, p: Pass) -> Iterator[Kept]:
        """Yield what the half after attention saves; one that recomputes makes it again by tile."""
        e, C, N = p.activation, self.mlp.size, p.tokens
        # The stream after attention, and copies of the weights before it
        yield Kept(e * C * N + p.weight_copy * self.attention.weights_after, ATTENTION)
        # Attention's output in FP8; the gate
        yield Kept(p.fp8_input * self.attention.query_size * N, MLP)
        yield Kept(self.attention.saved_gate(p) * N, MLP)
        # The input of the MLP, and 1 / rms
        yield Kept((p.fp8_input or e) * C * N, MLP)
        yield Kept(0 if self.mlp_norm is None else FP32 * N, ATTENTION)
        yield Kept(self.mlp.saved(p), MLP)
        if self.attention_out_norm is not None:  # its input is attention's projection
            # and the stream after it is saved too, by the next norm
            stream = 0 if self.mlp_norm is None else e * C * N
            yield Kept(FP32 * N + stream, ATTENTION)
        if self.mlp_out_norm is not None:
            yield Kept(e * C * N, MLP)
            yield Kept(FP32 * N, ATTENTION)

    def mlp_backward(self, p: Pass) -> float:
        """Return the bytes that the backward of the part after attention takes, at its peak."""
        e, C, q = p.activation, self.mlp.size, self.attention.query_size
        again = p.recompute != "none"
        n = p.tile if again else p.tokens
        tile = p._replace(tokens=n, weight_copy=0)
        # The gradients that come in, and of what is normalized or scaled; in FP8, transposed
        scaled = (self.mlp_out_norm is not None) + (self.branch_scale != 1)
        needed: float = e * C * p.tokens + scaled * e * C * n + p.fp8_input * C * n
        needed += self.mlp.backward(p._replace(tokens=n))
        if not again:
            return needed
        # What recompute=none keeps is made again of a tile, and the output
        needed += sum(kept.bytes for kept in self.kept_after(tile)) + e * C * n
        needed += (e * C + FP32) * n if self.attention.gate_size else 0  # the gate's input
        needed += p.weight_copy * self.weights_after
        if n < p.tokens:
            # Attention's output has its gradient for all tokens, the last tile's is there too.
            needed += e * q * p.tokens + e * (C + q) * n + p.gradient * self.weights_after
        return needed

    def attention_backward(self, p: Pass) -> int:
        """Return the bytes of attention's backward next to what its kernel takes."""
        e, C, q, kv = (
            p.activation,
            self.mlp.size,
            self.attention.query_size,
            self.attention.key_size,
        )
        # Residual; do, dq, dk, dv; gradients of the weights after attention
        needed = e * (C + 2 * q + 2 * kv) * p.tokens + p.gradient * self.weights_after
        needed += p.unpacked * self.attention.linears[0].weights
        if p.recompute == "block":
            needed += e * (q + 2 * kv) * p.tokens
            # With one tile the norm, and q and k before rotation too
            needed += e * (C + q + kv) * p.tokens if p.tile == p.tokens else 0
        elif self.attention.model.sinks:  # the gradient of the output before they scale it
            needed += e * q * p.tokens
        return needed

    def forward(self, p: Pass) -> int:
        """Return the bytes of a forward without gradients; p.tile tokens at a time in the MLP."""
        C, q = self.mlp.size, self.attention.query_size
        in_tile = 2 * C if self.mlp_out_norm is None else 3 * C
        return p.activation * ((2 * C + q) * p.tokens + in_tile * p.tile) + self.mlp.forward(p)
