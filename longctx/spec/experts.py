"""A feed-forward network of experts: its keys, and the part of a block. Torch-free.

A router gives every token to the `per_token` experts with the largest probabilities; each expert is
a SwiGLU of its own. So all weights take memory, and a token is multiplied by few of them. Shared
experts compute every token. Letters as in parts.py; E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longctx.config.fields import Group, key, positive
from longctx.spec.parts import FP32, FeedForward, LinearSpec, Pass

STEEPNESS = 1.702  # of gpt-oss's sigmoid, which makes its gate about a GELU
INT64 = 8  # bytes of an index
FORMULA = 9  # widths of an expert alive when no kernel of ours makes the gradients of gate and up


@dataclass
class ExpertsConfig(Group):
    """Experts in place of one feed-forward network, as in Mixtral: model.experts.count=8.

    dense_layers: layers without experts; the first is 0
    router: picks by: softmax: probability; sigmoid_bias: σ + an untrained bias, as in GLM-4.5
    shared: experts that compute every token, as in AFMoE
    clamp: c: gate · σ(1.702 gate) · (up + 1), gate ≤ c, up within ±c; null: silu(gate) · up
    balance: factor of the loss that balances experts (arXiv 2101.03961)
    """

    prefix = "model.experts."
    count: int | None = key(None, "per layer; null: one feed-forward network", between=(2, 4096))
    per_token: int = positive(2, "experts that compute each token", limit=4096, needs="count")
    ffn: int | None = positive(None, "inner width; null: model.ffn", limit=2**20, needs="count")
    dense_layers: list[int] = key([], between=(0, 4095), needs="count")
    router: str = key("softmax", choices=("softmax", "sigmoid_bias"), needs="count")
    shared: int = key(0, between=(0, 4096), needs="count")
    shared_gate: bool = key(False, "their sum times σ(w · input), as in Qwen3-Next", needs="shared")
    scale: float = key(1.0, "factor of the k weights of a token", above=0, needs="count")
    normalize: bool = key(True, "the k weights of a token add up to 1", needs="count")
    biased: bool = key(False, "biases in router and experts, as in gpt-oss", needs="count")
    clamp: float | None = key(None, above=0, needs="count")
    balance: float = key(0.0, between=(0, 1e6))


@dataclass(frozen=True)
class ExpertsSpec(FeedForward):
    """A router and the SwiGLUs of all experts, `inner` wide; their matrices are stacked by rows."""

    count: int
    keys: ExpertsConfig
    module = "longctx.model.experts.Experts"

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        C, F, E = self.size, self.inner, self.count
        gate_up = [f"experts.{n}.{name}" for n in range(E) for name in ("gate_proj", "up_proj")]
        down = [f"experts.{n}.down_proj" for n in range(E)]
        shared = self.dense.linears if self.dense else ()
        named = [(x, tuple(f"shared_experts.{name}" for name in x.tensors)) for x in shared]
        gate = LinearSpec("shared_gate", ("shared_expert_gate",), (1,), C, False, packs=False)
        return (
            LinearSpec("router", ("gate",), (E,), C, self.has_bias, packs=False),
            LinearSpec("gate_up", tuple(gate_up), (F,) * 2 * E, C, self.has_bias),
            LinearSpec("down", tuple(down), (C,) * E, F, self.has_bias, into_residual=True),
            *(x._replace(name=f"shared.{x.name}", tensors=tensors) for x, tensors in named),
            *([gate] if self.keys.shared_gate else []),
        )

    @cached_property
    def dense(self) -> FeedForward | None:
        """The shared experts, which are one."""
        inner = self.keys.shared * self.inner
        of = ("shared", "shared_experts", self.size, inner, False, self.activation)
        return FeedForward(*of) if inner else None

    @property
    def vectors(self) -> tuple[tuple[str, int], ...]:
        return (("correction.weight", self.count),) if self.keys.router == "sigmoid_bias" else ()

    @property
    def multiplied(self) -> int:
        active = self.keys.per_token + self.keys.shared
        return self.size * (self.count + self.keys.shared_gate + 3 * active * self.inner)

    @property
    def moved(self) -> int:
        """Width whose elementwise kernels move as much memory: rows are gathered and added up."""
        return self.keys.per_token * (self.inner + self.size) + self.keys.shared * self.inner

    def saved(self, p: Pass) -> int:
        """Return the bytes saved for backward: gate and up of all pairs, and the routing: the
        probabilities in fp32, before that σ and its sum; of the chosen ones value, weight, expert
        and sum; and two orders of the pairs. Weights of experts are cast again, the router's not.
        """
        kinds = 1 if self.keys.router == "softmax" else 2
        routing = kinds * FP32 * (self.count + 1) + self._of_chosen
        pairs = self.keys.per_token * p.activation * 2 * self.inner
        copy = p.weight_copy * self.linears[0].weights
        # A gate saves what it multiplies
        pairs += p.activation * (self.size + 2) * self.keys.shared_gate
        return (pairs + routing) * p.tokens + copy + (self.dense.saved(p) if self.dense else 0)

    @property
    def _of_chosen(self) -> int:
        return self.keys.per_token * (2 * FP32 + 3 * INT64)

    def backward(self, p: Pass) -> int:
        """Return the bytes alive at the peak of its backward, next to what it saved."""
        C, F = self.size, self.inner
        _, gate_up, down, *shared = (linear.weights for linear in self.linears)
        pairs = self.keys.per_token * p.activation * p.tokens
        # a weight's gradient is made in 16 bits, then cast
        narrow = p.activation if p.gradient > p.activation else 0
        copied = p.weight_copy + p.unpacked
        gradients = p.gradient * (down + gate_up)
        # d, product, both gradients; as a formula, clamped values and factors too
        inner = 4 if p.is_fused and self.keys.clamp is None else FORMULA
        moments = (
            # The gradients of gate and up are made: there is that of each pair's output
            pairs * (C + inner * F) + copied * down,
            # that of the down projections
            pairs * (C + 3 * F) + (p.gradient + narrow) * down,
            # those of the weights of gate and up, then of the inputs, and of tokens as their sum
            pairs * (C + 2 * F) + gradients + max(narrow, copied) * gate_up,
            pairs * 2 * C + gradients,
            # Shared experts are before or after all that
            self.dense.backward(p) if self.dense else 0,
        )
        return max(moments) + p.gradient * sum(shared)

    def forward(self, p: Pass) -> int:
        """Return the bytes alive in a forward without gradients, uncompiled."""
        C, F = self.size, self.inner
        # gathered, gate and up; their product; the output
        rows = max(C + 2 * F, 4 * F if self.keys.clamp is None else 6 * F, F + 2 * C)
        each = p.activation * self.keys.per_token * rows + FP32 * 2 * self.count + self._of_chosen
        unpacked = p.unpacked * self.linears[1].weights
        return max(each * p.tile + unpacked, self.dense.forward(p) if self.dense else 0)
