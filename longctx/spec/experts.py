"""A feed-forward network of experts: its keys, and the part of a block. Torch-free.

A router gives every token to the `per_token` experts with the largest probabilities; each expert is
a SwiGLU of its own. So all weights take memory, and a token is multiplied by few of them. Shared
experts compute every token.

Letters as in parts.py; E experts, k of them per token, M = k · N pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from longctx.config.fields import Group, key, positive
from longctx.spec.parts import FP32, Exact, FeedForward, LinearSpec, Pass, Piece

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
    per_token: int = positive(2, "experts that compute each token", limit=4096, needs="count")
    ffn: int | None = positive(
        None, "inner width of an expert; null: model.ffn", limit=2**20, needs="count"
    )
    dense_layers: list[int] = key(
        [], "layers without experts, as in Qwen3-MoE; first is 0", between=(0, 4095), needs="count"
    )
    router: str = key(
        "softmax",
        "how a token chooses: softmax: the largest probabilities; sigmoid_bias: the largest σ + a "
        "bias that is not trained, as in GLM-4.5",
        choices=("softmax", "sigmoid_bias"),
        needs="count",
    )
    shared: int = key(
        0,
        "experts that compute every token, side by side as one, as in AFMoE",
        between=(0, 4096),
        needs="count",
    )
    scale: float = key(1.0, "factor of the k weights of a token", above=0, needs="count")
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
    )

    def problems(self) -> Iterator[str]:
        """Yield a message for more experts per token than there are."""
        if self.count is not None and self.per_token > self.count:
            yield (
                f"model.experts.per_token={self.per_token}: there are "
                f"model.experts.count={self.count}; give at most that"
            )


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
        shared = () if self.dense is None else self.dense.linears
        return (
            LinearSpec("router", ("gate",), (E,), C, self.has_bias, packs=False),
            LinearSpec("gate_up", tuple(gate_up), (F,) * 2 * E, C, self.has_bias),
            LinearSpec("down", tuple(down), (C,) * E, F, self.has_bias, into_residual=True),
            *(
                x._replace(
                    name=f"shared.{x.name}",
                    tensors=tuple(f"shared_experts.{name}" for name in x.tensors),
                )
                for x in shared
            ),
        )

    @cached_property
    def dense(self) -> FeedForward | None:
        """The shared experts, which are one."""
        if not self.keys.shared:
            return None
        inner = self.keys.shared * self.inner
        return FeedForward("shared", "shared_experts", self.size, inner, False, self.activation)

    @property
    def vectors(self) -> tuple[tuple[str, int], ...]:
        return (("correction.weight", self.count),) if self.keys.router == "sigmoid_bias" else ()

    def pieces(self, theirs: str, ours: str) -> Iterator[Piece]:
        for piece in super().pieces(theirs, ours):
            is_exact = piece.theirs.endswith("correction.weight")
            yield piece._replace(fold=Exact()) if is_exact else piece

    @property
    def multiplied(self) -> int:
        own = self.count + 3 * self.keys.per_token * self.inner
        return self.size * (own + 3 * self.keys.shared * self.inner)

    @property
    def moved(self) -> int:
        """Width whose elementwise kernels move as much memory: rows are gathered and added up."""
        return self.keys.per_token * (self.inner + self.size) + self.keys.shared * self.inner

    def saved(self, p: Pass) -> int:
        """Return the bytes saved for backward: gate and up of all pairs, and the routing.

        The routing is the probabilities in fp32, before that σ and its sum; of the chosen ones
        value, weight, expert and sum; and two orders of the pairs. The router's weight is cast;
        those of experts are cast again.
        """
        k, E = self.keys.per_token, self.count
        kinds = 1 if self.keys.router == "softmax" else 2
        routing = kinds * FP32 * (E + 1) + k * (2 * FP32 + 3 * INT64)
        pairs = k * p.activation * 2 * self.inner
        shared = 0 if self.dense is None else self.dense.saved(p)
        return (pairs + routing) * p.tokens + p.weight_copy * self.linears[0].weights + shared

    def backward(self, p: Pass) -> int:
        """Return the bytes alive at the peak of its backward, next to what it saved.

        Moments compete. The gradients of gate and up are made: there are that of the output, of
        each pair, and of the product. Then the down projections have their gradient. Last
        come the gradients of the weights of gate and up, and of the inputs. Shared experts are
        before or after all that.
        """
        C, F, k, e = self.size, self.inner, self.keys.per_token, p.activation
        n = p.tokens
        _, gate_up, down, *shared = self.linears
        # a weight's gradient is made in 16 bits, then cast
        narrow = e if p.gradient > e else 0
        # d, product, both gradients; as a formula, clamped values and factors too
        inner = 4 * F if p.is_fused and self.keys.clamp is None else FORMULA * F
        copied = p.weight_copy + p.unpacked
        made = k * (C + inner) * e * n + copied * down.weights
        of_down = k * (C + 3 * F) * e * n + (p.gradient + narrow) * down.weights
        pairs = k * (C + 2 * F) * e * n
        gradients = p.gradient * (down.weights + gate_up.weights)
        of_both = pairs + gradients + narrow * gate_up.weights
        of_input = pairs + gradients + copied * gate_up.weights
        summed = 2 * k * C * e * n + gradients
        others = 0 if self.dense is None else self.dense.backward(p)
        needed = max(made, of_down, of_both, of_input, summed, others)
        return needed + p.gradient * sum(linear.weights for linear in shared)

    def forward(self, p: Pass) -> int:
        """Return the bytes alive in a forward without gradients, uncompiled."""
        C, F, k = self.size, self.inner, self.keys.per_token
        # gathered, gate and up; their product; the output
        rows = max(C + 2 * F, 4 * F if self.keys.clamp is None else 6 * F, F + 2 * C)
        routing = FP32 * 2 * self.count + k * (2 * FP32 + 3 * INT64)
        shared = 0 if self.dense is None else self.dense.forward(p)
        unpacked = p.unpacked * self.linears[1].weights
        return max((p.activation * k * rows + routing) * p.tile + unpacked, shared)
