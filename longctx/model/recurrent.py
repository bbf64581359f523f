"""The base of mixers with a state in place of keys, in mixers/.

The state S (K, V) of a head decays with each token, is corrected, and is read:

    S = e^g S,   S = S + k (β (v − kᵀ S)),   o = qᵀ S,   g = −e^A softplus(a + dt)

g is one number of a head, or one of each channel of its keys. Without β it is S = S + k vᵀ. q, k
and v come from a projection, a convolution of four tokens and SiLU; β and a from projections alone.

In chunks, with G the sum of g in a chunk up to a token, T = (I + tril(β k kᵀ e^{Gi−Gj}, −1))⁻¹:

    N = T (β v) − T (β k e^G) S,   O = (q e^G) S + tril(q kᵀ e^{Gi−Gj}) N,
    S = e^{Gc} S + (k e^{Gc−G})ᵀ N

Without β, N = v. A GPU computes it by fla-core (MIT) or not at all: chunks would be slow there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from longctx.model.mixer import Batch, Mixer, widened
from longctx.model.mixers.description import Cost, MixerSpec, rows_of

# Before, and with Triton before 3.7.1, gradients are wrong on Hopper (fla #1262 and #640)
REMEDY = "pip install 'fla-core>=0.6.0' einops"
TAPS = 4  # tokens of a convolution
CHUNK = 64


class Sizes(NamedTuple):
    """Numbers of heads and their channels; queries are as keys."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the channels of all queries, keys and values."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size


class Recurrent(Mixer):
    """A mixer with a state. A subclass has `sizes`; `rates_of`, the last tensors of `project`;
    `terms` of the formula, from queries, keys and values after their convolution and from rates;
    and `fused`, which returns outputs and states of the kernel of a GPU, of sequences in a row.
    `batch` is None if all heads are of this rank.
    """

    share: ClassVar[str | None] = "heads"
    reads_input = True
    exact = ("A_log", "dt_bias")
    sizes: Any

    @classmethod
    def weights(cls, spec: MixerSpec) -> Any:
        sizes, C = cls.sizes(spec), spec.size
        matrices = {"qkv": (sizes.widths, C), "out": (C, sizes.widths[-1])}
        per_head = dict.fromkeys(("A_log", "dt_bias"), (sizes.value_heads,))
        return {**matrices, "taps": (sizes.widths, 1, TAPS), **per_head}

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        sizes = cls.sizes(spec)
        channels, heads, values = sum(sizes.widths), sizes.value_heads, sizes.widths[-1]
        state = 4.0 * sizes.key_size * values
        # Products inside chunks; reading and changing the state; convolutions
        flops = heads * 4 * CHUNK * (sizes.key_size + sizes.value_size) + 1.5 * state
        # Tensors before and after convolutions, the output, rates; g and β; then states of chunks
        saved = e * (2 * channels + values + 2 * heads) + 8 * heads
        backward = e * 2 * (channels + values) + state / CHUNK
        return Cost(flops + 2 * TAPS * channels, saved, backward)

    @classmethod
    def heads(cls, spec: MixerSpec) -> int:
        # Several devices may have the same key head
        sizes = cls.sizes(spec)
        return int(sizes.value_heads if sizes.key_heads == 1 else sizes.key_heads)

    @classmethod
    def problem(cls, spec: MixerSpec) -> str | None:
        sizes = cls.sizes(spec)
        are_counts = all(type(number) is int and number > 0 for number in sizes)
        fits = are_counts and sizes.value_heads % sizes.key_heads == 0 and max(sizes[2:]) <= 256
        rule = "each from 1, value heads a multiple of key heads, sizes at most 256"
        return super().problem(spec) if fits else f"{sizes}: {rule}"

    @classmethod
    def refusal(cls, device: str) -> str | None:
        return fla_refusal() if device == "cuda" else None

    def start(self, name: str, weight: Tensor) -> None:
        if name == "A_log":
            weight.uniform_(0.01, 16).log_()
        elif name == "dt_bias":  # its softplus is between 0.001 and 0.1, as in Mamba
            weight.uniform_(math.log(1e-3), math.log(0.1)).exp_()
            weight.add_(torch.log(-torch.expm1(-weight)))
        elif name == "taps":
            weight.uniform_(-(TAPS**-0.5), TAPS**-0.5)
        else:
            weight.fill_(0 if name == "shift" else 1)

    def project(self, x: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys, values (B, T, heads, channels), and rates (B, T, heads, ...)."""
        sizes = self.sizes(self.part)
        queries, keys, values = self.qkv(x).split(sizes.widths, dim=-1)
        queries, keys = (part.unflatten(-1, (-1, sizes.key_size)) for part in (queries, keys))
        return queries, keys, values.unflatten(-1, (-1, sizes.value_size)), *self.rates_of(x)

    def rates_of(self, x: Tensor) -> Any:
        return self.rates(x).split(rows_of(self.part.shapes["rates"]), dim=-1)

    def decays(self, rates: Tensor, batch: Batch | None) -> tuple[Tensor, Tensor]:
        """Return softplus(a + dt) and g, (B, T, heads, ...) like the `rates` a."""
        weights = self.A_log, self.dt_bias
        log, bias = weights if batch is None else map(batch.own_heads, weights)
        steps = F.softplus(widened(rates) + bias.view(rates.shape[2:]))
        if least_step := self.part.options.get("least_step"):
            steps = steps.clamp(min=least_step)
        return steps, -log.exp().view(-1, *(1,) * (rates.ndim - 3)) * steps

    @property
    def filters(self) -> list[Tensor]:
        """Return the taps of the convolutions, and their biases if there are some."""
        return [getattr(self, name) for name in ("taps", "shift") if name in self.part.shapes]

    def convolved(self, inputs: Sequence[Tensor], batch: Batch, naive: bool) -> list[Tensor]:
        """Return silu of the causal convolutions of queries, keys and values, by document."""
        widths, found = self.sizes(self.part).widths, []
        filters = zip(*(weight.split(widths) for weight in self.filters), strict=True)
        for tensor, weights in zip(inputs, filters, strict=True):
            own = (batch.own_heads(weight, tensor[0, 0].numel()) for weight in weights)
            taps, *biases = (weight.to(tensor.dtype) for weight in own)
            channels, taps = tensor.flatten(2), taps[:, 0]
            if tensor.is_cuda and not naive:
                # The formula, compiled, is 10% slower in a whole step and keeps more for backward
                kernel = fla_kernel("modules.causal_conv1d:causal_conv1d", batch)
                tokens = channels.reshape(1, -1, channels.shape[2])
                total = kernel(tokens, taps, *biases, activation="silu")[0]
            else:
                total = convolution(channels, batch.positions, taps, *biases)
            found.append(total.view(tensor.shape))
        return found

    def finished(self, out: Tensor, values: Tensor, batch: Batch | None) -> Tensor:
        """Return the output of `forward`, from that of the formula and from convolved values."""
        return out.to(values.dtype)

    def with_states(self, *tensors: Any) -> Any:
        """Return the output, and without gradients the state after each document."""
        *given, batch = tensors
        inputs, rates = self.convolved(given[:3], batch, naive=False), given[3:]
        if inputs[0].is_cuda:
            rows = (tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in (*inputs, *rates))
            out, states = self.fused(batch, *rows, output_final_state=not torch.is_grad_enabled())
        else:
            out, states = chunked(batch, *self.terms(batch, *inputs, *rates))
        return self.finished(out.view(inputs[2].shape), inputs[2], batch), states

    def forward(self, *tensors: Any) -> Any:
        return self.with_states(*tensors)[0]

    def naive(self, *tensors: Any) -> Tensor:
        *given, batch = tensors
        inputs = self.convolved(given[:3], batch, naive=True)
        terms, outs = self.terms(batch, *inputs, *given[3:]), []
        state = terms[1].new_zeros(len(terms[1]), *terms[1].shape[2:], terms[2].shape[3])
        for token, begins in enumerate((batch.positions == 0).unbind(1)):
            state = state.masked_fill(begins[:, None, None, None], 0)
            out, state = one_token(state, *(x if x is None else x[:, token] for x in terms))
            outs.append(out)
        return self.finished(torch.stack(outs, dim=1), inputs[2], batch)

    def prefill(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, states = self.with_states(*tensors)
        inputs, offsets = joined(tensors).flatten(0, 1), tensors[-1].offsets
        # The convolutions read a document's last inputs next, and zeros before its first
        last = offsets[1:, None] + torch.arange(1 - TAPS, 0, device=inputs.device)
        past = inputs[last.clamp(min=0)] * (last >= offsets[:-1, None])[..., None]
        return out, (past, states)

    def step(self, *tensors: Any) -> Tensor:
        *given, past, state = tensors
        window = torch.cat([past, joined(given)], dim=1)
        past.copy_(window[:, 1:])
        taps, *shifts = (weight.to(window.dtype) for weight in self.filters)
        summed = sum(shifts, (window * taps[:, 0].mT).sum(1, keepdim=True))
        parts = F.silu(summed).split(self.sizes(self.part).widths, dim=-1)
        inputs = [part.view(x.shape) for part, x in zip(parts, given[:3], strict=True)]
        terms = self.terms(None, *inputs, *given[3:])
        out, changed = one_token(state, *(x if x is None else x[:, 0] for x in terms))
        state.copy_(changed)
        return self.finished(out[:, None], inputs[2], None)


def convolution(inputs: Tensor, positions: Tensor, taps: Tensor, *biases: Tensor) -> Tensor:
    """Return silu of the causal convolution of inputs (B, T, C) with `taps` (C, 4), by document."""
    total = sum(biases, torch.zeros_like(inputs))
    for back in range(TAPS):
        moved = F.pad(inputs, (0, 0, back, 0))[:, : inputs.shape[1]]
        total = total + taps[:, -1 - back] * moved * (positions >= back)[..., None]
    return F.silu(total)


def joined(inputs: Sequence[Any]) -> Tensor:
    """Return queries, keys and values side by side, (B, T, channels)."""
    return torch.cat([tensor.flatten(2) for tensor in inputs[:3]], dim=-1)


def one_token(state: Tensor, *token: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o (B, H, V) and the next state of `state` (B, H, K, V), for q, k, v, g and β of a
    token; g is (B, H) or (B, H, K), β (B, H) or None.
    """
    query, key, value, decay = (widened(tensor) for tensor in token[:4] if tensor is not None)
    state = state * decay.exp().reshape(*decay.shape[:2], -1, 1)
    if token[4] is not None:
        value = token[4][..., None] * (value - torch.einsum("bhkv,bhk->bhv", state, key))
    state = state + key[..., None] * value[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, query), state


def products(left: Tensor, right: Tensor, fades: Tensor) -> Tensor:
    """Return the sums over c of left_ic right_jc fades_ijc; `fades` has one c, or as many."""
    if fades.shape[-1] == 1:
        return left @ right.mT * fades[..., 0]
    return torch.einsum("...ic,...jc,...ijc->...ij", left, right, fades)


def chunked(batch: Batch, *terms: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return o (B, T, H, V) of all tokens, and without gradients the state after each document, for
    q, k, v, g and β as in `one_token`, (B, T, ...).
    """
    given = [widened(tensor) for tensor in terms if tensor is not None]
    given = [tensor if tensor.ndim == 4 else tensor[..., None] for tensor in given]
    tokens, size = batch.length, CHUNK if given[3].shape[3] == 1 else 16
    more = -tokens % size  # padding, a document of its own
    # (B, T, H, D) → (chunks, B, H, size, D)
    padded = (F.pad(tensor, (0, 0, 0, 0, 0, more)) for tensor in given)
    chunks = (tensor.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4) for tensor in padded)
    queries, keys, values, decays, *strengths = chunks
    numbers = F.pad(batch.documents, (0, more), value=-1).unflatten(1, (-1, size))
    numbers = numbers.transpose(0, 1)[:, :, None]
    same = (numbers[..., :, None] == numbers[..., None, :]).tril()[..., None]
    # carried: tokens of the previous chunk's last document
    before = F.pad(numbers[:-1, ..., -1:], (0, 0, 0, 0, 0, 0, 1, 0), value=-1)
    carried = (numbers == before)[..., None]
    # e^{Gi−Gj} and e^G; fp64, or a large sum of one document would round the next one's
    sums, wide = decays.double().cumsum(dim=-2), keys.dtype
    differences = sums[..., :, None, :] - sums[..., None, :, :]
    fades = (differences.clamp(max=0).exp() * same).to(wide)
    reached = (sums.exp() * carried).to(wide)
    fresh, removed = values, None
    for strength in strengths:
        corrections = (strength * products(keys, keys, fades)).tril(-1)
        sides = torch.cat([strength * values, strength * keys * reached], dim=-1)
        solved = torch.linalg.solve_triangular(corrections, sides, upper=False, unitriangular=True)
        fresh, removed = solved.split((values.shape[-1], keys.shape[-1]), dim=-1)
    inner, reads = products(queries, keys, fades), queries * reached
    # e^{Gc−G} and e^{Gc}
    kept, falls = (keys * fades[..., -1, :, :]).mT, reached[..., -1:, :].mT
    states = [keys.new_zeros(*keys.shape[1:3], keys.shape[-1], values.shape[-1])]
    changes: list[Tensor] = []
    for chunk, new in enumerate(fresh):
        changes.append(new if removed is None else new - removed[chunk] @ states[chunk])
        states.append(falls[chunk] * states[chunk] + kept[chunk] @ changes[chunk])
    state, change = torch.stack(states[:-1]), torch.stack(changes)
    out = (reads @ state + inner @ change).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens]
    if torch.is_grad_enabled():
        return out, None
    ends = batch.offsets[1:] - 1
    rows, at = ends // tokens, ends % tokens
    place = at // size, rows, slice(None), at % size
    added = (keys[place[:2]] * fades[place]).mT @ change[place[:2]]
    return out, reached[place][..., None] * state[place[:2]] + added


@cache
def fla_refusal() -> str | None:
    """Return why no kernel of fla-core can run, with a remedy, or None."""
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"on a GPU it takes the kernels of fla-core, which is not installed: {REMEDY}"
    if Version(found) < Version("0.6"):
        return f"fla-core {found} has wrong gradients on some GPUs: {REMEDY}"
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if is_hopper and Version(triton := version("triton")) < Version("3.7.1"):
        return f"fla-core has wrong gradients with Triton {triton}: pip install 'triton>=3.7.1'"
    return None


def fla_kernel(path: str, batch: Batch | None = None) -> Any:
    """Return fla's function "module:name", for documents of `batch` in a row, or ValueError."""
    if reason := fla_refusal():
        raise ValueError(f"a recurrent layer: {reason}")
    kernel = resolve_name(f"fla.{path}")
    if batch is None:
        return kernel
    # With a copy on the host nothing waits for the device
    lengths = batch.mask.lengths or (batch.length,) * batch.sequences
    on_host = torch.tensor([0, *lengths]).cumsum(0)
    return partial(kernel, cu_seqlens=batch.offsets, cu_seqlens_cpu=on_host)
