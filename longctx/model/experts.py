"""A feed-forward network of experts (arXiv 1701.06538), by torch's grouped matrix product.

    p = softmax(router(x))
    y = Σ over the k largest p_e of w_e · down_e(silu(gate_e(x)) · up_e(x))

with w_e = p_e, or normalized p_e / Σ p. A sigmoid router has p = σ(router(x)), and chooses by p + a
correction (arXiv 2408.15664). No token is dropped. The M = N · k pairs of a token and an expert are
sorted by expert; expert e has the rows from ends[e - 1] to ends[e], so that all experts are three
products of fixed shapes and nothing waits for the device:

    gate_up (M, 2F) = x of the pairs (M, C) · Wᵀ of their experts;   inner = silu(gate) · up · w
    y (M, C) = inner · Wᵀ of their experts;   the k rows of a token are added up

Backward saves gate_up alone: the rows of x are gathered again, and since down is linear, the
gradient of w needs no y: ∂w = ⟨silu(gate) · up, down_eᵀ(dy)⟩. The k gradients of a token are added
up in a fixed order, so a step repeats to the bit. LoRA adds scale · (x Aᵀ) Bᵀ of the same expert to
each product x Wᵀ; the narrow x Aᵀ is made again in backward.

Shapes: N tokens, C channels, E experts of F channels, k experts per token; r is LoRA's rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.attention.exchange import Ranks
from longctx.kernels import HAS_TRITON
from longctx.model.layers import ACTIVATIONS, MLP, NoNorm, fused, linears
from longctx.model.packed import is_packed, unpacked
from longctx.spec import experts

if HAS_TRITON:
    from longctx.kernels import swiglu


class Experts(nn.Module):
    """A router, the experts of its choice for each token, and shared experts for all tokens."""

    def __init__(self, part: experts.ExpertsSpec) -> None:
        super().__init__()
        self.keys = keys = part.keys
        self.variant: Any = keys.clamp or part.activation
        self.variant = self.variant if part.has_gate else ACTIVATIONS[part.activation]
        self.router, self.gate_up, self.down, *others = linears(part)
        self.gate_up.experts = self.down.experts = part.count
        # Added to scores for the choice alone: loaded, it stays as it is
        added = {"weight": nn.Parameter(torch.zeros(part.count), requires_grad=False)}
        self.exact = ("correction",) if keys.router == "sigmoid_bias" else ()
        self.correction = nn.ParameterDict(added) if self.exact else None
        self.shared = MLP(part.dense) if part.dense.inner else None
        self.shared_gate = others[-1] if keys.shared_gate else None
        self.norms: Any = nn.ModuleDict({name: NoNorm() for name in experts.NORMS})
        self.norms.update({norm.name: norm.build() for norm in part.norms})

    def forward(self, x: Tensor, needs_value: bool = True) -> Tensor:
        """Return (..., C), of x (..., C); without `needs_value` maybe 0, with right gradients."""
        # Not compiled: the compiler would save the gathered rows and the weights' copies in 16
        # bits, in a model of 16 experts 11% of the peak, and the balance before the layers that
        # follow. Asked here, since a decorator imports the compiler, which takes a second.
        is_traced = torch.compiler.is_compiling()
        needs_value |= self.keys.beside  # the gradient of a norm needs its input
        total = (torch.compiler.disable(self.routed) if is_traced else self.routed)(x, needs_value)
        total = self.norms["routed_out"](total)
        if self.shared is None:
            return total
        if self.shared_gate is not None:
            return total + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return total + self.norms["mlp_out"](self.shared(self.norms["mlp"](x), needs_value))

    def routed(self, x: Tensor, needs_value: bool) -> Tensor:
        """Return the sum of the chosen experts, or 0 without `needs_value`."""
        shape, device = x.shape, x.device.type
        # Autocast casts the inputs of linear layers, and does not know our operator
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        tokens = self.norms["routed"](x).reshape(-1, shape[-1])
        weights, chosen = self.chosen(self.router(self.norms["router"](x).reshape(tokens.shape)))
        expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(self.router.out_features, device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
        (*up_lora, up_scale), (*down_lora, down_scale) = self.gate_up.added, self.down.added
        layers = self.gate_up.weight, self.gate_up.bias, *up_lora
        layers += self.down.weight, self.down.bias, *down_lora
        routing, scales = (expert, order, ends), (up_scale, down_scale)
        y = _Experts.apply(tokens, weights, *routing, scales, self.variant, needs_value, *layers)
        return y.view(shape)

    def chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, and the experts, of its logits (N, E)."""
        # In fp32, as in transformers; the logits have the dtype of the product.
        keys, wide = self.keys, torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(wide) * self.router.in_features**-0.5 if keys.beside else logits
        if self.correction is None:
            total, chances = None, logits.softmax(-1, dtype=wide)
            ranking = chances.detach()
        else:
            scores = logits.to(wide).sigmoid()
            total = scores.sum(-1, keepdim=True)
            chances, ranking = scores / total, scores.detach() + self.correction["weight"]
        if keys.groups > 1:
            # Only experts of the groups with the largest sums of their best scores
            groups = ranking.unflatten(1, (keys.groups, -1))
            best = groups.topk(keys.group_scores).values.sum(-1).topk(keys.top_groups).indices
            others = torch.ones_like(groups[..., 0]).scatter_(1, best, 0).bool()
            ranking = groups.masked_fill(others[..., None], -torch.inf).flatten(1)
        balance = running() if keys.balance else None
        if balance is not None and chances.requires_grad:
            chances.register_hook(balance.with_own_gradient)
        experts = ranking.topk(keys.per_token).indices
        weights = chances.gather(1, experts)
        if balance is not None:
            balance.count(chances, experts)
        if keys.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        elif total is not None:
            weights = weights * total
        if keys.beside:
            weights = weights * self.norms["experts"].factor[experts]
        return weights if keys.scale == 1 else weights * keys.scale, experts


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each row of x (M, I) with the matrix of its expert, (E, I, O)."""
    # A GPU multiplies 16 bits in one launch; otherwise there is a product for each expert.
    if x.is_cuda and x.itemsize == 2:
        return F.grouped_mm(x, matrices, offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def grouped_outer(dy: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dyᵀ x of each expert's rows, of dy (M, O) and x (M, I), stacked: (E·O, I)."""
    if x.is_cuda and x.itemsize == 2:
        return F.grouped_mm(dy.t(), x, offs=ends).to(dtype).flatten(0, 1)
    borders = ends[:-1].tolist()
    pairs = zip(dy.tensor_split(borders), x.tensor_split(borders), strict=True)
    return torch.cat([part.t() @ rows for part, rows in pairs]).to(dtype)


def gated(gate_up: Tensor, variant: Any) -> Tensor:
    """Return `variant`(gate) · up of (M, 2F); clamped at a number; or a function's of (M, F)."""
    if callable(variant):
        return variant(gate_up)
    if isinstance(variant, str) and fused(gate_up):
        return swiglu.swiglu(gate_up, variant)
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(variant, str):
        return ACTIVATIONS[variant](gate) * up
    gate, up = gate.clamp(max=variant), up.clamp(-variant, variant)
    return gate * torch.sigmoid(experts.STEEPNESS * gate) * (up + 1)


def gated_backward(gate_up: Tensor, dinner: Tensor, variant: Any) -> tuple[Tensor, Tensor]:
    """Return the gradient of gate_up, from that of the product, and the product again."""
    if isinstance(variant, str) and fused(gate_up):
        return swiglu.swiglu_backward(gate_up, dinner, variant)
    leaf = gate_up.detach().requires_grad_()
    with torch.enable_grad():
        product = gated(leaf, variant)
    (gradient,) = torch.autograd.grad(product, leaf, dinner)
    return gradient, product.detach()


class _Stack(NamedTuple):
    """A layer of all experts, of pairs in the order of their experts."""

    weight: Tensor  # (E·O, I)
    bias: Any  # (E·O,), or None
    lora_a: Any  # (E·r, I), or None
    lora_b: Any  # (E·O, r), or None
    scale: float  # of LoRA
    ends: Tensor  # (E,) of the pairs of each expert

    def matrices(self, weight: Tensor, x: Tensor) -> Tensor:
        """Return the weight (E, rows, columns), or bias, of each expert, in the dtype of x."""
        weight = unpacked(weight, x.dtype) if is_packed(weight) else weight
        return weight.to(x.dtype).unflatten(0, (len(self.ends), -1))

    def product(self, x: Tensor) -> Tensor:
        """Return the outputs (M, O) of x (M, I), without the bias."""
        y = grouped(x, self.matrices(self.weight, x).mT, self.ends)
        if self.lora_a is not None:
            y += grouped(self.low(x), self.matrices(self.lora_b, x).mT, self.ends)
        return y

    def low(self, x: Tensor) -> Tensor:
        """Return scale · x Aᵀ (M, r)."""
        return grouped(x, self.matrices(self.lora_a, x).mT, self.ends).mul_(self.scale)

    def low_gradient(self, dy: Tensor) -> Tensor | None:
        """Return the gradient of x Aᵀ, if there is LoRA, from that of the outputs."""
        if self.lora_a is None:
            return None
        return grouped(dy, self.matrices(self.lora_b, dy), self.ends).mul_(self.scale)

    def input_gradient(self, dy: Tensor, low_gradient: Tensor | None) -> Tensor:
        """Return the gradient of x, from those of the outputs and of x Aᵀ."""
        dx = grouped(dy, self.matrices(self.weight, dy), self.ends)
        if low_gradient is not None:
            dx += grouped(low_gradient, self.matrices(self.lora_a, dy), self.ends)
        return dx

    def gradients(
        self, x: Tensor, dy: Tensor, low_gradient: Tensor | None, expert: Tensor, weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return gradients of A and B with LoRA, else of weight and bias, added `weights` times."""
        if low_gradient is None:
            dbias = None
            if self.bias is not None:
                # As a product the rows are added up in a fixed order
                own = weights * (expert[:, None] == torch.arange(len(self.ends), device=dy.device))
                dbias = (own.to(dy.dtype).t() @ dy).flatten().to(self.bias.dtype)
            return grouped_outer(dy, x, self.ends, self.weight.dtype), dbias, None, None
        pairs = (low_gradient, x), (dy, self.low(x))
        return None, None, *(grouped_outer(*pair, self.ends, self.lora_a.dtype) for pair in pairs)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (N, C)
        weights: Tensor,  # (N, k)
        expert: Tensor,  # (M,) of each pair, in order
        order: Tensor,  # (M,) pair n · k + i is the i-th of token n
        ends: Tensor,  # (E,) of the pairs of each expert
        scales: tuple[float, float],  # of LoRA
        variant: Any,
        needs_value: bool,
        *layers: Tensor | None,  # weight, bias, A and B of gate and up, and those of down
    ) -> Tensor:
        (N, C), per_token = x.shape, weights.shape[1]
        up, down = _stacks(layers, scales, ends)
        gate_up = up.product(x[order // per_token])
        if up.bias is not None:
            gate_up += up.matrices(up.bias, x)[expert]
        # Each pair's place among the sorted ones: rows are gathered, since atomics have no order
        back = order.argsort()
        expert_saved = expert if down.bias is not None else None
        ctx.save_for_backward(x, weights, gate_up, expert_saved, order, back, ends, *layers)
        ctx.scales, ctx.variant = scales, variant
        if not needs_value:
            return x.new_zeros(1, 1).expand(N, C)
        pair_weights = weights.flatten()[order, None]
        y = down.product(gated(gate_up, variant).mul_(pair_weights))
        if down.bias is not None:
            y += down.matrices(down.bias, x)[expert].mul_(pair_weights)
        return y[back].view(N, per_token, C).sum(1, dtype=x.dtype)  # autocast's sums are in fp32

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, expert, order, back, ends, *layers = ctx.saved_tensors
        up, down = _stacks(layers, ctx.scales, ends)
        (N, C), per_token = x.shape, weights.shape[1]
        is_trained = [any(ctx.needs_input_grad[n : n + 4]) for n in (8, 12)]
        pair_weights, tokens = weights.flatten()[order, None], order // per_token
        rows = dy[tokens]
        low_gradient = down.low_gradient(rows)
        dinner = down.input_gradient(rows, low_gradient)
        dgate_up, inner = gated_backward(gate_up, dinner, ctx.variant)
        dweights = (dinner * inner).sum(-1, dtype=weights.dtype)
        del dinner
        if down.bias is not None:
            bias = down.matrices(down.bias, x)[expert]
            dweights += (rows * bias).sum(-1, dtype=weights.dtype)
            del bias
        # Now by the weight of the pair, as it was in forward
        dgate_up.mul_(pair_weights)
        up_gradients: tuple[Tensor | None, ...] = (None,) * 4
        down_gradients = up_gradients
        if is_trained[1]:
            inner.mul_(pair_weights)
            down_gradients = down.gradients(inner, rows, low_gradient, expert, pair_weights)
        del rows, inner
        low_gradient = up.low_gradient(dgate_up)
        if is_trained[0]:
            ones = torch.ones_like(pair_weights)
            up_gradients = up.gradients(x[tokens], dgate_up, low_gradient, expert, ones)
        dx = up.input_gradient(dgate_up, low_gradient)
        del dgate_up
        dx = dx[back].view(N, per_token, C).sum(1, dtype=x.dtype)
        return dx, dweights[back].view(N, per_token), *(None,) * 6, *up_gradients, *down_gradients


def _stacks(layers: Any, scales: tuple[float, float], ends: Tensor) -> Iterator[_Stack]:
    for first, scale in zip((0, 4), scales, strict=True):
        yield _Stack._make((*layers[first : first + 4], scale, ends))


class Balance:
    """The loss that balances experts, of one forward pass over all its layers and tokens.

        loss = E · Σ_e f_e · P_e

    f_e are the tokens of expert e, P_e the sum of its probabilities, each divided by the number of
    tokens in all layers, as in transformers (Switch, arXiv 2101.03961, has one for each layer).
    f has no gradient, so that of a probability is E · f_e / tokens, the same everywhere. It is
    known when all layers have run, and added in backward: a block that runs again there has it too.
    Every token counts, padding and prompts among them; a micro-batch balances alone. The value is
    no part of the loss that is returned and logged: losses of other factors could not be compared.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor  # of the loss
        self.layers_run = False
        self.sums: Tensor | None = None  # (2, E): tokens of each expert, probabilities
        self.rows = 0
        self.slope: Tensor | None = None  # (E,) of the loss by each token's probability
        self.upstream: Tensor | None = None  # gradient of the loss that this one was added to
        # E · Σ f P, and the tokens of the busiest expert, over all layers, over the mean
        self.figures: dict[str, Tensor] = {}

    def count(self, chances: Tensor, chosen: Tensor) -> None:
        """Count the tokens of a layer, or a tile of them."""
        if self.layers_run:
            return
        tokens = torch.zeros_like(chances).scatter_(1, chosen, 1.0).sum(0)
        sums = torch.stack((tokens, chances.detach().sum(0)))
        self.sums = sums if self.sums is None else self.sums + sums
        self.rows += len(chances)

    def join(self, loss: Tensor, scale: Tensor | float, ranks: Ranks) -> None:
        """Add this loss's gradient times `scale` in backward of `loss`; `ranks` share sequences."""
        self.layers_run = True
        assert self.sums is not None
        if ranks.count > 1:
            dist.all_reduce(self.sums, group=ranks.process_group)
        tokens, chances = self.sums / (self.rows * ranks.count)
        self.slope = self.factor * len(tokens) * tokens / (self.rows * ranks.count) * scale
        loads = {"aux_loss": len(tokens) * (tokens @ chances)}
        self.figures = loads | {"expert_load": tokens.max() / tokens.mean()}
        if loss.requires_grad:
            loss.register_hook(partial(setattr, self, "upstream"))

    def with_own_gradient(self, d: Tensor) -> Tensor:
        """Return the gradient `d` of a layer's probabilities, with that of this loss."""
        assert self.slope is not None and self.upstream is not None
        return d + self.slope * self.upstream


_balance: ContextVar[Balance | None] = ContextVar("balance", default=None)
# This thread's forward pass has it, or the one whose blocks run again
running = _balance.get


@contextmanager
def balancing(balance: Balance | None) -> Iterator[None]:
    """Count the experts of every layer for `balance` inside the block."""
    token = _balance.set(balance)
    try:
        yield
    finally:
        _balance.reset(token)
