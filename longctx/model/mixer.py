"""A mixer: the layer of a block in which tokens see one another. Softmax attention is one, in
layers.py; this is the base of all others, in mixers/ and in plugins.

A mixer is called in three parts, as attention is. Recomputation runs the first and the last in
tiles:

    tensors = project(normed x),   out = forward(*tensors, batch),   added = branch(out, normed x)

`project` and `branch` see each token alone, and do nothing unless a mixer brings its own. So
`forward(x, batch)` is all that a simple one needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from longctx.attention import Mask
from longctx.attention.description import AttentionConfig
from longctx.attention.exchange import Ranks, Ulysses
from longctx.model.layers import Linear, SelfAttention
from longctx.model.mixers.description import Cost, MixerSpec, rows_of

ALONE = Ranks()


class Batch:
    """The documents of sequences (B, T), and the ranks that share them. `mask` is bound and causal
    inside documents, with the window of the layer if it has one.
    """

    def __init__(self, mask: Mask, sequences: int, ranks: Ranks = ALONE) -> None:
        if mask.kind not in ("causal", "documents"):
            raise ValueError(f"a mask of kind {mask.kind}: model.mixer takes causal ones alone")
        self.mask, self.ranks, self.window = mask, ranks, mask.window
        assert mask.last is not None
        self.sequences, self.length, self.device = sequences, mask.last.shape[1], mask.last.device

    @cached_property
    def positions(self) -> Tensor:
        """Return each token's position in its own document, (B, T) int64."""
        return self.mask.positions(self.sequences, self.length, self.device)

    @cached_property
    def offsets(self) -> Tensor:
        """Return cu_seqlens of all sequences in a row, int64: starts of documents, and the end."""
        if self.mask.doc_ids is None:
            return self.length * torch.arange(self.sequences + 1, device=self.device)
        assert self.mask.offsets is not None, "`offsets` change, so write capturable = False"
        return self.mask.offsets.long()

    @cached_property
    def documents(self) -> Tensor:
        """Return each token's document, (B, T) int64, counted through all sequences."""
        return (self.positions == 0).flatten().cumsum(0).view(self.sequences, self.length) - 1

    @property
    def seen(self) -> Tensor:
        """Return True for each key that a query sees, (B, T, T)."""
        distance = self.positions[:, :, None] - self.positions[:, None]
        same = self.documents[:, :, None] == self.documents[:, None]
        return same & (distance >= 0) & (distance < (self.window or self.length))

    def own_heads(self, weight: Tensor, rows: int = 0) -> Tensor:
        """Return the rows of `weight`, equally many for each head, of this rank's heads. Their
        number is `rows`; with 0, no other rank has the same heads.
        """
        parts = len(weight) // rows if rows else self.ranks.count
        return weight.chunk(parts)[self.ranks.rank * parts // self.ranks.count]


class Mixer(nn.Module):
    """The base of mixers. `weights` names them, `forward` computes, `naive` is the formula.

    A weight of two dimensions is a linear layer, called as `self.NAME(x)`; FP8 and Muon know it,
    LoRA by its name. If its rows are a tuple of numbers, it stacks several matrices. Other weights
    are parameters. A matrix called `out` writes to the residual stream, so its initial weights are
    smaller.

    options: the keys of model.mixer_options.NAME, with their defaults
    share: how context=N divides it; "heads": a rank has all tokens of some heads, that is of
        dimension 2 of all `tensors` and of `out`, and `batch.own_heads` of weights; None: refused
    names: weight → its tensor, or tensors, in a layer of a Hugging Face folder, for a family;
        without it MIXER.NAME.weight, or MIXER.NAME.0.weight and on of a stack
    capturable: True if CUDA graphs can hold it: it reads no `offsets`, and no tensor on the host
    softmax_calls: calls of softmax attention in one forward
    needs: "key_bias" or "score" if the backend of softmax attention must take such
    lacks: keys of a model that it would ignore
    reads_input: True if `branch` takes the normed input x
    cached: tensors of `project` that decoding keeps of all tokens; None: it has a state
    exact: weights that export leaves in fp32. A run in 16 bits leaves these matrices in fp32 too,
        and every weight that is no matrix
    """

    options: ClassVar[Mapping[str, Any]] = {}
    share: ClassVar[str | None] = None
    names: ClassVar[Mapping[str, Any]] = {}
    capturable: ClassVar[bool] = False
    softmax_calls: ClassVar[int] = 0
    needs: ClassVar[Set[str]] = frozenset()
    lacks: ClassVar[Sequence[str]] = ()
    reads_input: Any = False
    cached: ClassVar[slice | None] = None
    exact: ClassVar[tuple[str, ...]] = ()

    def __init__(self, part: MixerSpec, backend: AttentionConfig) -> None:
        # Softmax attention makes its own weights, and inside a mixer too: a dot is in their names
        own = part.softmax if isinstance(self, SelfAttention) else None
        super().__init__(*(() if own is None else (own, backend)))
        self.part, self.backend = part, backend
        try:
            for linear in part.linears[len(own.linears) if own else 0 :]:
                if "." not in linear.name:
                    self.add_module(linear.name, Linear(linear.columns, linear.outputs, bias=False))
            for name, _ in part.vectors[len(own.vectors) if own else 0 :]:
                shape = part.shapes[name]
                zeros = torch.zeros(sum(rows_of(shape)), *shape[1:])
                self.register_parameter(name, nn.Parameter(zeros))
        except KeyError as error:  # such as a weight called `forward`
            raise part.mistake(f"weights: {error.args[0]}; rename the weight") from error

    @classmethod
    def weights(cls, spec: MixerSpec) -> Mapping[str, tuple[Any, ...]]:
        """Return each weight's shape, of the hidden size spec.size and of keys of spec.model."""
        raise NotImplementedError(f"{cls.__name__} has no weights")

    @classmethod
    def cost(cls, spec: MixerSpec, e: int) -> Cost:
        """Return its cost with activations of e bytes; the default is a guess."""
        return Cost(saved=8 * e * spec.size, backward=8 * e * spec.size)

    @classmethod
    def called(cls, spec: MixerSpec) -> dict[str, Any]:
        """Return the keys of the attention that it calls, if they differ from the model's."""
        return {}

    @classmethod
    def heads(cls, spec: MixerSpec) -> int:
        """Return the number of heads that devices share if `share` is "heads"."""
        return int(spec.model.heads)

    @classmethod
    def problem(cls, spec: MixerSpec) -> str | None:
        """Return why no such layer can be made, with a remedy, or None."""
        values = {f"model.{name}": getattr(spec.model, name) for name in cls.lacks}
        given = [f"{name}={x}" for name, x in values.items() if x not in (False, None, "none")]
        return f"it has no {given[0]}; leave that out" if given else None

    @classmethod
    def refusal(cls, device: str) -> str | None:
        """Return why it cannot compute on "cuda" or "cpu", with a remedy, or None."""
        return None

    def start(self, name: str, weight: Tensor) -> None:
        """Initialize a weight that is no matrix; a norm's with ones, others with zeros."""
        nn.init.constant_(weight, "norm" in name)

    def project(self, x: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors for `forward`, from normed inputs x (B, T, C) and rotary `angles`."""
        return (x,)

    def forward(self, *tensors: Any) -> Tensor:
        """Return (B, T, ...) of the tensors (B, T, ...) of `project`, and a `Batch`."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def naive(self, *tensors: Any) -> Tensor:
        """Return the result of `forward`, by the formula."""
        raise NotImplementedError

    def branch(self, out: Tensor, x: Tensor | None) -> Tensor:
        """Return the branch (B, T, C) of the output of `forward`, and of the normed input x."""
        return out

    # Decoding: without `step` each new token computes its whole text again

    def prefill(self, *tensors: Any) -> Any:
        """Return the result of `forward`, and the state after each document, (documents, ...)."""

    def step(self, *tensors: Any) -> Any:
        """Return out (B, 1, ...) for the next token of each text, given the tensors of `project`
        and the state, which is updated in place; or what is `cached`, (B, S, ...), and a mask.
        """

    @property
    def decodes(self) -> bool:
        """Return True if it has a `step`, which knows softmax attention by its formula alone."""
        is_formula = self.backend.variant is None or not self.softmax_calls
        return type(self).step is not Mixer.step and is_formula

    if TYPE_CHECKING:  # its weights have the names of `weights`

        def __getattr__(self, name: str) -> Any: ...

    def __call__(self, *arguments: Any) -> Tensor:
        """Call `forward`, with the heads of this rank if ranks share sequences."""
        *tensors, batch = arguments
        exchange, own = Ulysses(batch.ranks), list[Tensor]()
        # If there are fewer heads than ranks, several ranks get the same one
        for x in tensors if batch.ranks.count > 1 else ():
            wide = x.repeat_interleave(max(1, batch.ranks.count // x.shape[2]), 2)
            own += exchange.to_heads(wide.unflatten(2, (batch.ranks.count, -1)))
        out = super().__call__(*(own or tensors), batch)
        self.part.check_shape("forward returns", out, (own or tensors)[0].shape[:2])
        return exchange.to_tokens(out)[0] if own else out


def widened(x: Tensor) -> Tensor:
    """Return x in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
