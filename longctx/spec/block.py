"""A transformer block: its parts in order, and what they cost together. Torch-free.

Letters as in parts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longctx.spec.parts import FP32, Attention, FeedForward, Linear, Norm, Part, Pass


@dataclass(frozen=True)
class Block:
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)); norms may be missing."""

    attention_norm: Norm | None
    attention: Attention
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
    def linears(self) -> dict[str, Linear]:
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
    def packed(self) -> list[Linear]:
        """Linear layers whose frozen weights are in the format lora.base."""
        return [linear for linear in self.linears.values() if linear.packs]

    def weight_bytes(self, base: str | None, each: int) -> int:
        """Return the bytes of its weights, with `each` of one that is not packed as `base`."""
        if base is None:
            return each * self.weights
        saved = [each * linear.weights - linear.packed_bytes(base) for linear in self.packed]
        return each * self.weights - sum(saved)

    @cached_property
    def weights_after(self) -> int:
        """Weights of the linear layers after attention, where recompute=mlp begins."""
        return self.weights - self.attention.linears[0].weights

    def saved(self, p: Pass, keeps_input: bool = True) -> float:
        """Return the bytes that the block saves for backward."""
        stream = p.activation * self.mlp.size * p.tokens
        if p.recompute == "block":
            return self.attention.saved_output(p) + (stream if keeps_input else 0)
        # A product saves its input, which without a norm is the stream itself
        unnormed = (p.fp8_input or p.activation) * self.mlp.size * p.tokens
        normed = 0 if self.attention_norm is None else stream + self.attention_norm.saved(p)
        saved: float = normed or unnormed
        saved += self.attention.saved(p)
        if p.recompute == "mlp":
            return saved if self.attention_norm is not None or not p.fp8_input else saved + stream
        saved += self.attention.saved_after(p) + self.mlp.saved(p)
        saved += unnormed if self.mlp_norm is None else self.mlp_norm.saved(p)
        if self.attention_out_norm is not None:  # its input is attention's projection
            # and the stream after it is saved too, by the next norm
            saved += FP32 * p.tokens + (0 if self.mlp_norm is None else stream)
        if self.mlp_out_norm is not None:  # its input, and 1 / rms
            saved += stream + FP32 * p.tokens
        return saved

    def mlp_backward(self, p: Pass) -> int:
        """Return the bytes that the backward of the part after attention takes, at its peak."""
        e, C, q, n = p.activation, self.mlp.size, self.attention.query_size, p.tile
        needed = e * C * p.tokens + self.mlp.backward(p)  # the gradient that comes in
        # The gradient of what is normalized or scaled too
        scaled = (self.mlp_out_norm is not None) + (self.branch_scale != 1)
        needed += scaled * e * C * (p.tokens if p.recompute == "none" else n)
        if p.recompute == "none":
            return needed + p.fp8_input * C * p.tokens  # transposed in FP8
        needed += (3 if self.mlp_norm is not None else 2) * e * C * n  # projection, norm, output
        if self.attention.gate_size:  # made again, of its input
            needed += (e * C + FP32 + self.attention.saved_gate(p)) * n
        for out_norm in (self.attention_out_norm, self.mlp_out_norm):
            needed += 0 if out_norm is None else e * C * n
        if p.fp8_input:
            needed += p.fp8_input * (C + q) * n - (e - p.fp8_input) * C * n
        needed += p.weight_copy * self.weights_after
        if n < p.tokens:
            # Attention's output has its gradient for all tokens, the last tile's is there too.
            needed += e * q * p.tokens + e * (C + q) * n + p.gradient * self.weights_after
        return needed

    def freed_after_mlp(self, p: Pass) -> int:
        """Return the saved bytes that are freed before attention's backward."""
        C, q = self.mlp.size, self.attention.query_size
        each = (p.fp8_input or p.activation) * C + p.fp8_input * q  # the norm, attention's output
        each += 0 if self.mlp_out_norm is None else p.activation * C
        each += self.attention.saved_gate(p)
        return self.mlp.saved(p) + each * p.tokens

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

    def forward_elements(self, tokens: int, mlp_tokens: int) -> int:
        """Return the elements alive in an evaluation's forward, `mlp_tokens` at a time in the MLP.

        They are the residual stream and its norm; attention's q, k, v and output; the MLP's input,
        output, and what it computes between them.
        """
        outputs = 2 if self.attention.model.sinks else 1  # before and after they scale it
        heads = (1 + outputs) * self.attention.query_size + 2 * self.attention.key_size
        return tokens * (4 * self.mlp.size + heads) + mlp_tokens * self.mlp.forward_elements()
