"""A transformer block: its parts in order. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longctx.spec.parts import AttentionSpec, FeedForward, LinearSpec, Norm, Part


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
