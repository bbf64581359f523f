"""A feed-forward network of experts: its keys, and the part of a block. Torch-free.

A router gives every token to the `per_token` experts with the largest probabilities; each expert is
a SwiGLU of its own. So all weights take memory, and a token is multiplied by few of them.

Letters as in parts.py; E experts, k of them per token, M = k · N pairs of a token and an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longctx.config.fields import Group, key
from longctx.config.parts import FP32, FeedForward, Linear, Pass

STEEPNESS = 1.702  # of gpt-oss's sigmoid, which makes its gate about a GELU
INT64 = 8  # bytes of an index
FORMULA = 9  # widths of an expert alive when no kernel of ours makes the gradients of gate and up


@dataclass
class ExpertsConfig(Group):
    """Experts in place of one feed-forward network, as in Mixtral: model.experts.count=8."""

    prefix = "model.experts."
    count: int | None = key(
        None, "of a layer; null: one feed-forward network, no experts", between=(2, 4096)
    )
    per_token: int = key(2, "experts that compute each token", between=(1, 4096), needs="count")
    ffn: int | None = key(
        None, "inner width of an expert; null: model.ffn", between=(1, 2**20), needs="count"
    )
    dense_layers: list[int] = key(
        [], "layers without experts, as in Qwen3-MoE; first is 0", between=(0, 4095), needs="count"
    )
    normalize: bool = key(True, "the k weights of a token add up to 1", needs="count")
    biased: bool = key(False, "biases in router and experts, as in gpt-oss", needs="count")
    clamp: float | None = key(
        None,
        "c: gate · σ(1.702 gate) · (up + 1), gate at most c, up within ±c, as in gpt-oss; null: "
        "silu(gate) · up",
        above=0,
        needs="count",
    )
    balance: float = key(
        0.0,
        "factor of the loss that balances experts (Switch, arXiv 2101.03961); 0: none",
        between=(0, 1e6),
        needs="count",
    )

    def check_together(self) -> None:
        """Raise ValueError for more experts per token than there are."""
        if self.count is not None and self.per_token > self.count:
            raise ValueError(
                f"model.experts.per_token={self.per_token}: there are "
                f"model.experts.count={self.count}; give at most that"
            )


@dataclass(frozen=True)
class Experts(FeedForward):
    """A router and the SwiGLUs of all experts, `inner` wide; their matrices are stacked by rows."""

    count: int
    per_token: int
    normalize: bool
    balance: float  # factor of the balancing loss
    clamp: float | None  # of gate and up, see ExpertsConfig
    module = "longctx.model.experts.Experts"

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        C, F, E = self.size, self.inner, self.count
        gate_up = [f"experts.{n}.{name}" for n in range(E) for name in ("gate_proj", "up_proj")]
        down = [f"experts.{n}.down_proj" for n in range(E)]
        return (
            Linear("router", ("gate",), (E,), C, self.has_bias),
            Linear("gate_up", tuple(gate_up), (F,) * 2 * E, C, self.has_bias),
            Linear("down", tuple(down), (C,) * E, F, self.has_bias, into_residual=True),
        )

    @property
    def multiplied(self) -> int:
        return self.size * (self.count + 3 * self.per_token * self.inner)

    @property
    def moved(self) -> int:
        """Width whose elementwise kernels move as much memory: rows are gathered and added up."""
        return self.per_token * (self.inner + self.size)

    def saved(self, p: Pass) -> int:
        """Return the bytes saved for backward: gate and up of all pairs, and the routing.

        The routing is the probabilities in fp32; of the chosen ones value, weight, expert and sum;
        and two orders of the pairs. The router's weight is cast; those of experts are cast again.
        """
        k, E = self.per_token, self.count
        routing = FP32 * (E + 1) + k * (2 * FP32 + 3 * INT64)
        pairs = k * p.activation * 2 * self.inner
        return (pairs + routing) * p.tokens + p.weight_copy * self.linears[0].weights

    def backward(self, p: Pass) -> int:
        """Return the bytes alive at the peak of its backward, next to what it saved.

        Moments compete. The gradients of gate and up are made: there are that of the output, of
        each pair, and of the product. Then the down projections have their gradient. Last
        come the gradients of the weights of gate and up, and of the inputs.
        """
        C, F, k, e = self.size, self.inner, self.per_token, p.activation
        again = p.recompute != "none"
        n = p.tile if again else p.tokens
        _, gate_up, down = self.linears
        # a weight's gradient is made in 16 bits, then cast
        narrow = e if p.gradient > e else 0
        # d, product, both gradients; as a formula, clamped values and factors too
        inner = 4 * F if p.is_fused and self.clamp is None else FORMULA * F
        made = k * (C + inner) * e * n + p.weight_copy * down.weights
        of_down = k * (C + 3 * F) * e * n + (p.gradient + narrow) * down.weights
        pairs = k * (C + 2 * F) * e * n
        gradients = p.gradient * (down.weights + gate_up.weights)
        of_both = pairs + gradients + narrow * gate_up.weights
        of_input = pairs + gradients + p.weight_copy * gate_up.weights
        summed = 2 * k * C * e * n + gradients
        needed = max(made, of_down, of_both, of_input, summed)
        return needed + (self.saved(p._replace(tokens=n, weight_copy=0)) if again else 0)

    def forward(self, p: Pass) -> int:
        """Return the bytes alive in a forward without gradients, uncompiled."""
        C, F, k = self.size, self.inner, self.per_token
        # gathered, gate and up; their product; the output
        rows = max(C + 2 * F, 4 * F if self.clamp is None else 6 * F, F + 2 * C)
        routing = FP32 * 2 * self.count + k * (2 * FP32 + 3 * INT64)
        return (p.activation * k * rows + routing) * p.tile

    def forward_elements(self) -> int:
        """Return the elements of a token alive in an evaluation's forward."""
        return self.per_token * max(self.size + 2 * self.inner, 4 * self.inner) + 2 * self.count
