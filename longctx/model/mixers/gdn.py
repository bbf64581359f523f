"""Gated delta rule (arXiv 2412.06464), with the layers around it as in Qwen3-Next and Qwen3.5.

A head has a state S (K, V), which each token decays, corrects and reads:

    S = e^g S,   S = S + k (β (v − kᵀ S)),   o = qᵀ S / √K,   g = −e^A softplus(a + dt), β = σ(b)

q, k and v come from a projection, a convolution of four tokens and SiLU; q and k have length 1. The
output is normed and gated. With β in (0, 2) the state's eigenvalues may be negative (2411.12537).

In chunks, with G the sum of g in a chunk up to a token, T = (I + tril(β k kᵀ e^{Gi−Gj}, −1))⁻¹:

    N = T (β v) − T (β k e^G) S,   O = (q e^G) S + tril(q kᵀ e^{Gi−Gj}) N,
    S = e^{Gc} S + (k e^{Gc−G})ᵀ N
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.attention import Mask
from longctx.model import fla
from longctx.model.mixer import Batch, Mixer, widened
from longctx.model.mixers.description import Cost, MixerSpec, register

TAPS = 4  # tokens of a convolution
CHUNK = 64
EPS = 1e-6  # of the squared lengths of queries and keys


class Sizes(NamedTuple):
    """Numbers of heads and their channels; queries are as keys."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the channels of all queries, keys and values."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size


class GatedDelta(Mixer):
    """The gated delta rule; a key head serves several value heads. null, 0: as in the model."""

    options = {**dict.fromkeys(Sizes._fields), "norm_eps": 0.0, "negative": False}
    names = {
        "qkv": "linear_attn.in_proj_qkv.weight",
        "rates": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
        "gate": "linear_attn.in_proj_z.weight",
        "out": "linear_attn.out_proj.weight",
        "taps": "linear_attn.conv1d.weight",
        "norm": "linear_attn.norm.weight",
        "A_log": "linear_attn.A_log",
        "dt_bias": "linear_attn.dt_bias",
    }
    share = "heads"
    reads_input = True
    exact = ("A_log", "dt_bias")

    @classmethod
    def sizes(cls, spec: MixerSpec) -> Sizes:
        """Return the sizes of such a layer."""
        # Values are as keys, and these as attention's
        given = {n: x for n, x in spec.options.items() if n in Sizes._fields and x is not None}
        keys = {"key_heads": spec.model.heads, "key_size": spec.model.head_size} | given
        values = {"value_heads": keys["key_heads"], "value_size": keys["key_size"]} | keys
        return Sizes(**values)

    @classmethod
    def weights(cls, spec: MixerSpec) -> dict[str, tuple[Any, ...]]:
        sizes, C = cls.sizes(spec), spec.size
        heads, width = sizes.value_heads, sizes.widths[-1]
        matrices: dict[str, tuple[Any, ...]] = {"qkv": (sizes.widths, C)}
        matrices |= {"rates": ((heads, heads), C), "gate": (width, C), "out": (C, width)}
        others = {"taps": (sum(sizes.widths), 1, TAPS), "A_log": (heads,), "dt_bias": (heads,)}
        return matrices | others | {"norm": (sizes.value_size,)}

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        sizes = cls.sizes(spec)
        channels, (width, _, values) = sum(sizes.widths), sizes.widths
        heads, per_head = sizes.value_heads, sizes.key_size + sizes.value_size
        state = 4.0 * heads * sizes.key_size * sizes.value_size
        # Products inside chunks; reading and changing the state; convolutions
        flops = heads * 4 * CHUNK * per_head + 1.5 * state + 2 * TAPS * channels
        # q, k, v before and after the convolution, q and k normed, T, rates, the output; g and β
        saved = e * (2 * channels + 2 * width + heads * (CHUNK + 2) + values) + 8 * heads
        return Cost(flops, saved, e * (3 * channels + 2 * values) + 2 * state / CHUNK)

    @classmethod
    def width(cls, spec: MixerSpec) -> int:
        return cls.sizes(spec).widths[-1]

    @classmethod
    def heads(cls, spec: MixerSpec) -> int:
        return cls.sizes(spec).key_heads

    @classmethod
    def problem(cls, spec: MixerSpec) -> str | None:
        sizes = cls.sizes(spec)
        are_counts = all(type(number) is int and number > 0 for number in sizes)
        if are_counts and sizes.value_heads % sizes.key_heads == 0 and max(sizes[2:]) <= 256:
            return None
        return f"{sizes}: value heads are a multiple of key heads, and sizes 256 at most"

    @classmethod
    def refusal(cls, device: str) -> str | None:
        return fla.refusal() if device == "cuda" else None

    def start(self, name: str, weight: Tensor) -> None:
        if name == "A_log":
            weight.uniform_(0.01, 16).log_()
        elif name == "dt_bias":  # its softplus is between 0.001 and 0.1, as in Mamba
            weight.uniform_(math.log(1e-3), math.log(0.1)).exp_()
            weight.add_(torch.log(-torch.expm1(-weight)))
        elif name == "norm":
            weight.fill_(1)
        else:
            weight.uniform_(-(TAPS**-0.5), TAPS**-0.5)

    def project(self, x: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys, values (B, T, heads, channels), and b and a (B, T, heads)."""
        sizes = self.sizes(self.part)
        queries, keys, values = self.qkv(x).split(sizes.widths, dim=-1)
        queries, keys = (part.unflatten(-1, (-1, sizes.key_size)) for part in (queries, keys))
        values = values.unflatten(-1, (-1, sizes.value_size))
        return queries, keys, values, *self.rates(x).chunk(2, dim=-1)

    def decay(self, rates: Tensor, batch: Batch | None = None) -> Tensor:
        """Return g, (B, T, heads) like the `rates` a."""
        weights = self.A_log, self.dt_bias
        log, bias = weights if batch is None else map(batch.own_heads, weights)
        return -log.exp() * F.softplus(widened(rates) + bias)

    def strength(self, rates: Tensor) -> Tensor:
        """Return β, (B, T, heads) like the `rates` b."""
        return widened(rates).sigmoid() * (2 if self.part.options["negative"] else 1)

    def convolved(self, inputs: Sequence[Tensor], batch: Batch, naive: bool) -> list[Tensor]:
        """Return queries, keys and values after their convolutions."""
        taps = map(batch.own_heads, self.taps.split(self.sizes(self.part).widths))
        pairs = zip(inputs, taps, strict=True)
        return [fla.short_convolution(tensor, own, batch, naive) for tensor, own in pairs]

    def with_states(self, *tensors: Any) -> tuple[Tensor, Tensor]:
        """Return the output, and the state after each document; on a CPU after the last."""
        *inputs, strengths, rates, batch = tensors
        queries, keys, values = self.convolved(inputs, batch, naive=False)
        decays, strengths = self.decay(rates, batch), self.strength(strengths)
        if not values.is_cuda:
            given = decays, strengths, batch.documents
            out, state = chunked(*normed(queries, keys, values), *given)
            return out.to(values.dtype), state
        parts = queries, keys, values, decays, strengths.to(values.dtype)
        rows = [part.reshape(1, -1, *part.shape[2:]) for part in parts]
        rule = fla.kernel("ops.gated_delta_rule:chunk_gated_delta_rule")
        wants_state = not torch.is_grad_enabled()
        choices = {"use_qk_l2norm_in_kernel": True, "output_final_state": wants_state}
        out, states = rule(*rows, **choices, **fla.documents_of(batch))
        return out.view(values.shape), states

    def forward(self, *tensors: Any) -> Tensor:
        return self.with_states(*tensors)[0]

    def naive(self, *tensors: Any) -> Tensor:
        *inputs, strengths, rates, batch = tensors
        queries, keys, values = normed(*self.convolved(inputs, batch, naive=True))
        given = queries, keys, values, self.decay(rates, batch), self.strength(strengths)
        state, outs = keys.new_zeros(len(keys), *keys.shape[2:], values.shape[3]), []
        for token in range(queries.shape[1]):
            begins = (batch.positions[:, token] == 0)[:, None, None, None]
            state = state.masked_fill(begins, 0)
            out, state = one_token(state, *(tensor[:, token] for tensor in given))
            outs.append(out)
        return torch.stack(outs, dim=1).to(inputs[0].dtype)

    def branch(self, out: Tensor, x: Tensor | None) -> Tensor:
        gate = self.gate(x).view(out.shape).to(out.dtype)
        eps = self.part.options["norm_eps"] or self.part.model.norm_eps
        gated = fla.gated_norm(out, gate, self.norm, eps)
        branch: Tensor = self.out(gated.flatten(2))
        return branch

    def prefill(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        *given, batch = tensors
        inputs, offsets = joined(given).flatten(0, 1), batch.offsets
        # The convolutions read a document's last inputs next, and zeros before its first
        last = offsets[1:, None] + torch.arange(1 - TAPS, 0, device=inputs.device)
        past = inputs[last.clamp(min=0)] * (last >= offsets[:-1, None])[..., None]
        if inputs.is_cuda:
            out, states = self.with_states(*tensors)
            return out, (past, states)
        parts = []
        for first, end in pairwise(batch.offsets_on_host.tolist()):
            alone = Batch(Mask.causal().bind(1, end - first, end - first, inputs.device), 1)
            document = (tensor.flatten(0, 1)[None, first:end] for tensor in given)
            parts.append(self.with_states(*document, alone))
        outs, ends = zip(*parts, strict=True)
        return torch.cat(outs, dim=1).view(given[2].shape), (past, torch.cat(ends))

    def step(self, *tensors: Any) -> Tensor:
        *inputs, strengths, rates, past, state = tensors
        window = torch.cat([past, joined(inputs)], dim=1)
        past.copy_(window[:, 1:])
        summed = (window * self.taps[:, 0].mT.to(window.dtype)).sum(1, keepdim=True)
        parts = F.silu(summed).split([tensor[0, 0].numel() for tensor in inputs], dim=-1)
        convolved = (part.view(tensor.shape) for part, tensor in zip(parts, inputs, strict=True))
        given = *normed(*convolved), self.decay(rates), self.strength(strengths)
        out, changed = one_token(state, *(tensor[:, 0] for tensor in given))
        state.copy_(changed)
        return out[:, None].to(inputs[0].dtype)


def joined(inputs: Sequence[Tensor]) -> Tensor:
    """Return queries, keys and values side by side, (B, T, channels)."""
    return torch.cat([tensor.flatten(2) for tensor in inputs[:3]], dim=-1)


def normed(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Return q / √K and k of length 1, with as many heads as the values, and the values."""
    repeats = values.shape[2] // keys.shape[2]
    wide = [widened(tensor).repeat_interleave(repeats, dim=2) for tensor in (queries, keys)]
    queries, keys = (
        tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + EPS) for tensor in wide
    )
    return queries * queries.shape[3] ** -0.5, keys, widened(values)


def one_token(state: Tensor, *token: Tensor) -> tuple[Tensor, Tensor]:
    """Return o (B, H, V) and the next state of `state` (B, H, K, V), for q, k, v, g and β of a
    token; g and β are (B, H).
    """
    query, key, value, decay, strength = token
    state = state * decay.exp()[..., None, None]
    seen = torch.einsum("bhkv,bhk->bhv", state, key)
    correction = strength[..., None] * (value - seen)
    state = state + key[..., None] * correction[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, query), state


def chunked(*tensors: Tensor, size: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return o (B, T, H, V) of all tokens and the state of the last document, for q, k, v, g and β
    as in `one_token`, (B, T, ...), and the number of each token's document.
    """
    *inputs, decays, strengths, documents = tensors
    rows, tokens = documents.shape
    # Padding has β and g of 0, and so leaves the state of the last document
    more = -tokens % size
    documents = torch.cat([documents, documents[:, -1:].expand(rows, more)], dim=1)
    # (B, T, H, D) → (chunks, B, H, size, D)
    given = *inputs, decays[..., None], strengths[..., None]
    padded = (F.pad(tensor, (0, 0, 0, 0, 0, more)) for tensor in given)
    chunks = (tensor.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4) for tensor in padded)
    queries, keys, values, decays, strengths = chunks
    numbers = documents.unflatten(1, (-1, size)).transpose(0, 1)[:, :, None]
    same = (numbers[..., :, None] == numbers[..., None, :]).tril()
    # carried: tokens of the previous chunk's last document; stays: of this chunk's last one
    before = F.pad(numbers[:-1, ..., -1:], (0, 0, 0, 0, 0, 0, 1, 0), value=-1)
    carried, stays = ((numbers == tensor)[..., None] for tensor in (before, numbers[..., -1:]))
    # e^{Gi−Gj}, e^G and e^{Gc−G}; fp64, or a large sum of one document would round the next one's
    sums, wide = decays.double().cumsum(dim=-2), keys.dtype
    fades = ((sums - sums.mT).clamp(max=0).exp() * same).to(wide)
    reached = (sums.exp() * carried).to(wide)
    kept = keys * ((sums[..., -1:, :] - sums).exp() * stays).to(wide)
    corrections = strengths * (keys @ keys.mT) * fades.tril(-1)
    sides = torch.cat([strengths * values, strengths * keys * reached], dim=-1)
    solved = torch.linalg.solve_triangular(corrections, sides, upper=False, unitriangular=True)
    fresh, removed = solved.split((values.shape[-1], keys.shape[-1]), dim=-1)
    inner, reads, falls = queries @ keys.mT * fades, queries * reached, reached[..., -1:, :]
    state, outs = keys.new_zeros(*keys.shape[1:3], keys.shape[-1], values.shape[-1]), []
    for chunk in range(len(queries)):
        changes = fresh[chunk] - removed[chunk] @ state
        outs.append(reads[chunk] @ state + inner[chunk] @ changes)
        state = falls[chunk] * state + kept[chunk].mT @ changes
    return torch.stack(outs).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens], state


register("gdn", GatedDelta)
