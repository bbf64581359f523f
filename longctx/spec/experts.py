"""A feed-forward network of experts: its keys, and the part of a block. Torch-free.

A router gives every token to the `per_token` experts with the largest probabilities; each expert is
a SwiGLU of its own. So all weights take memory, and a token is multiplied by few of them. Shared
experts compute every token. Letters as in parts.py; E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longctx.config.fields import Group, key, positive
from longctx.spec.parts import FP32, FeedForward, LinearSpec, Norm, Pass

STEEPNESS = 1.702  # of gpt-oss's sigmoid, which makes its gate about a GELU
OF_CHOSEN = 2 * FP32 + 3 * 8  # bytes of each chosen expert: see `saved`
NORMS = ("mlp", "mlp_out", "router", "routed", "routed_out")  # around experts next to an MLP
FUSED, FORMULA = 5, 8  # widths alive at gradients of gate and up; without a gate as by a kernel


@dataclass
class ExpertsConfig(Group):
    """Experts in place of one feed-forward network, as in Mixtral: model.experts.count=8.

    router: picks by: softmax: probability; sigmoid_bias: σ + an untrained bias, as in GLM-4.5
    clamp: c: gate · σ(1.702 gate) · (up + 1), gate ≤ c, up within ±c; null: silu(gate) · up
    balance: factor of the loss that balances experts (arXiv 2101.03961)
    """

    prefix = "model.experts."
    count: int | None = key(None, "per layer; null: one feed-forward network", between=(2, 4096))
    per_token: int = positive(2, "experts that compute each token", limit=4096, needs="count")
    ffn: int | None = positive(None, "inner width; null: model.ffn", limit=2**20, needs="count")
    dense_layers: list[int] = key([], "layers without, from 0", between=(0, 4095), needs="count")
    groups: int = positive(1, "of experts, in a row", limit=4096, needs="count")
    top_groups: int = positive(1, "whose experts a token can have", limit=4096, needs="count")
    group_scores: int = positive(2, "best ones whose sum ranks a group", limit=4096, needs="count")
    router: str = key("softmax", choices=("softmax", "sigmoid_bias"), needs="count")
    shared: int = key(0, "experts that compute every token", between=(0, 4096), needs="count")
    beside: bool = key(False, "and an MLP, each between norms, as in Gemma 4", needs="count")
    shared_gate: bool = key(False, "shared sum times σ(w·input), as in Qwen3-Next", needs="shared")
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
    dense: FeedForward  # the shared experts or the MLP beside, as one; 0 wide without any
    norms: list[Norm]  # around both, and a weight of each expert; none without an MLP beside
    module = "longctx.model.experts.Experts"

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        C, F, E, k, bias = self.size, self.inner, self.count, self.keys.per_token, self.has_bias
        gate_up = tuple(f"experts.{n}.{x}" for n in range(E) for x in self.projections)
        down = tuple(f"experts.{n}.down_proj" for n in range(E))
        dense = self.dense.linears if self.dense.inner else ()
        shared = [(x, tuple(f"shared_experts.{name}" for name in x.tensors)) for x in dense]
        gate = LinearSpec("shared_gate", ("shared_expert_gate",), (1,), C, False, packs=False)
        return (
            LinearSpec("router", ("gate",), (E,), C, bias, packs=False),
            LinearSpec("gate_up", gate_up, (F,) * len(gate_up), C, bias, experts=E, active=k),
            LinearSpec("down", down, (C,) * E, F, bias, into_residual=True, experts=E, active=k),
            *(x._replace(name=f"shared.{x.name}", tensors=names) for x, names in shared),
            *([gate] if self.keys.shared_gate else []),
        )

    @property
    def vectors(self) -> tuple[tuple[str, int], ...]:
        norms = [(f"norms.{x.name}.{name}", size) for x in self.norms for name, size in x.vectors]
        return (*norms, *[("correction.weight", self.count)] * (self.keys.router == "sigmoid_bias"))

    @property
    def moved(self) -> int:
        """Width whose elementwise kernels move as much memory: rows are gathered and added up."""
        return self.keys.per_token * (self.inner + self.size) + self.dense.inner

    def saved(self, p: Pass) -> int:
        """Return the bytes saved for backward: gate and up of all pairs, and the routing: the
        probabilities in fp32, before that σ and its sum; of the chosen ones value, weight, expert
        and sum; and two orders of the pairs. Weights of experts are cast again, the router's not.
        """
        kinds = 1 if self.keys.router == "softmax" else 2
        routing = kinds * FP32 * (self.count + 1) + self.keys.per_token * OF_CHOSEN
        pairs = self.keys.per_token * p.activation * len(self.projections) * self.inner
        copy = p.weight_copy * self.linears[0].weights
        pairs += p.activation * (self.size + 2) * self.keys.shared_gate  # that a gate multiplies
        if self.norms:  # what they give or take, and 1 / rms; weights of the chosen ones
            pairs += 5 * (p.activation * self.size + FP32) + 2 * FP32 * self.keys.per_token
        return (pairs + routing) * p.tokens + copy + self.dense.saved(p)

    def backward(self, p: Pass) -> int:
        """Return the bytes alive at the peak of its backward, next to what it saved."""
        C, F, G = self.size, self.inner, len(self.projections) * self.inner
        _, gate_up, down, *shared = (linear.weights for linear in self.linears)
        pairs = self.keys.per_token * p.activation * p.tokens
        # a weight's gradient is made in 16 bits, then cast
        narrow = p.activation if p.gradient > p.activation else 0
        gradients = p.gradient * (down + gate_up)
        is_fused = (p.is_fused and self.keys.clamp is None) or not self.has_gate
        moments = (
            # There is the gradient of each pair's output; that of the product is made, then more
            self.product(p, pairs, C, F, down),
            pairs * (C + (FUSED if is_fused else FORMULA) * F),
            # that of the down projections
            pairs * (C + G + F) + (p.gradient + narrow) * down,
            # those of the weights of gate and up, then of the inputs, and of tokens as their sum
            pairs * (C + G) + gradients + narrow * gate_up,
            self.product(p, pairs, G, C, gate_up) + gradients,
            pairs * (2 * C + ("gate_up" in p.adapted) * G) + gradients,
            # Shared experts are before or after all that
            self.dense.backward(p),
        )
        # An MLP beside has freed by then what the gradients between norms take
        return max(moments) + p.gradient * sum(shared)

    def product(self, p: Pass, pairs: int, before: int, made: int, weights: int) -> int:
        """Return the bytes alive in a product: widths `before` and `made`, and its weights."""
        copied = (p.weight_copy or min(p.unpacked, p.activation)) * weights
        return pairs * before + max(p.unpacked * weights, pairs * made + copied)

    def forward(self, p: Pass) -> int:
        """Return the bytes alive in a forward without gradients, uncompiled."""
        C, F, k, G = self.size, self.inner, self.keys.per_token, len(self.projections) * self.inner
        pairs, adapted = p.activation * k * p.tile, p.adapted
        inner = 7 if self.keys.clamp is not None else 3 if p.is_fused or not self.has_gate else 4
        moments = (
            # gate and up of the gathered rows; their product; the output, and its sum by token
            self.product(p, pairs, C, G, self.linears[1].weights),
            pairs * max(inner * F, C + ("gate_up" in adapted) * 2 * G),
            self.product(p, pairs, G + F, C, self.linears[2].weights),
            pairs * (G + 2 * C + max(C // k, ("down" in adapted) * F)),
        )
        routed = max(moments) + (FP32 * 2 * self.count + k * OF_CHOSEN) * p.tile
        return max(routed, self.dense.forward(p))
