"""longctx's attention in models of transformers, from release 5 on:

    import longctx.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longctx")

"longctx" is attention=flash; "longctx_sdpa", "longctx_naive" and so on are the other backends.
Documents come from position_ids that restart, or from cu_seq_lens_q, never from a mask that
transformers makes: transformers materializes none. Windows, sinks, softcap and scale come from the
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

from longctx.attention import Attention, Mask, attention
from longctx.attention.registry import registered
from longctx.config.fields import refuse

NAME = "longctx"
BACKENDS = {NAME: "flash"} | {f"{NAME}_{name}": name for name in registered()}
LAYERS = 8  # that a proof computes at most


class Documents:
    """The documents of a batch, and the mask of each window; modules that have one as `documents`
    ask it, not their arguments. Ranks may share the sequences, see `Shards`.
    """

    def __init__(self, backend: str, options: dict[str, Any]) -> None:
        self.backend, self.options = backend, options
        self.mask: Mask | None = None
        self.shards: Any = None
        self.by_window: dict[int | None, Mask] = {}
        self.callers: dict[tuple[float | None, float | None], Attention] = {}
        self.outputs: Outputs | None = None  # of the layer that is being computed
        self.calls = 0  # of attention, so that a model without any is noticed

    def begin(self, mask: Mask | None, shards: Any = None) -> None:
        """Take the bound `mask` of the next forward; None: keys from a cache, one document."""
        self.mask, self.shards = mask, shards
        self.by_window.clear()

    def of(self, window: int | None) -> Mask:
        """Return the mask of layers with this `window`."""
        self.calls += 1
        if self.mask is None:
            return Mask.causal(window)
        if window not in self.by_window:
            mask = self.mask if window is None else self.mask.windowed(window)
            self.by_window[window] = mask if self.shards is None else self.shards.mask(mask)
        return self.by_window[window]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Mask,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        """Return attention's output (B, T, H, D), saved for recomputation if a layer keeps it."""
        caller = self.callers.get((scale, softcap))
        if caller is None:
            caller = Attention(self.backend, self.options, scale, softcap)
            self.callers[scale, softcap] = caller
        if self.outputs is None or not caller.saves_output:
            return caller(q, k, v, mask, sinks)
        out: Tensor = _Kept.apply(q, k, v, sinks, mask, caller, self.outputs)
        return out

    @contextmanager
    def keeping(self, outputs: Outputs) -> Iterator[None]:
        """Use `outputs` for the layer that is computed in the block."""
        self.outputs = outputs
        try:
            yield
        finally:
            self.outputs = None


class Outputs:
    """Output and lse of the attentions of one layer, from its forward to its recomputation."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.is_complete = False


class _Kept(torch.autograd.Function):
    """Attention that a recomputed layer does not compute again: it takes what forward kept."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Mask,
        caller: Attention,
        outputs: Outputs,
    ) -> Tensor:
        if outputs.is_complete:
            out, lse = outputs.kept.pop(0)
        else:
            out, lse = caller.with_lse(q, k, v, mask, sinks)
            outputs.kept.append((out, lse))
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.mask, ctx.caller = mask, caller
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        gradients = ctx.caller.backward(do, q, k, v, out, lse, ctx.mask, sinks)
        return *gradients, *[None] * (7 - len(gradients))


def recomputed(documents: Documents, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a layer; backward computes it again, but for its attention.

    torch's selective checkpointing does the same, but looks at every operator from Python.
    """
    outputs = Outputs()

    @contextmanager
    def again() -> Iterator[None]:
        outputs.is_complete = True
        with documents.keeping(outputs):
            yield

    return checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (documents.keeping(outputs), again()),
        preserve_rng_state=False,
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    backend: str = "flash",
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query (B, H, T, D), key and value (B, Hkv, Tk, D or less)
    → (B, T, H, width of value). Raises ValueError for what would silently be left out.
    """
    refuse(
        (dropout, f"attention_dropout={dropout}: longctx has none; set it to 0"),
        (
            others.get("position_bias") is not None,
            "position_bias: longctx adds none to the scores; use another attention",
        ),
    )
    # a layer that passes None has no window, whatever its module says
    window = others.get("sliding_window", getattr(module, "sliding_window", None))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    # a model of ours has its documents; others tell by their arguments
    documents: Documents | None = module.__dict__.get("documents")
    options: dict[str, Any] = {}
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal:
        mask = Mask.full()
    elif documents is not None:
        mask, backend, options = documents.of(window), documents.backend, documents.options
    else:
        refuse_chunks(module, k.shape[1])
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask of {attention_mask.ndim} dimensions: longctx takes documents from "
                "position_ids, and padding as (B, T); give neither, or one of these"
            )
        mask = mask_of(attention_mask, q.shape[1], k.shape[1], window, others)
    # MLA: values are narrower than keys
    width = v.shape[3]
    if width < q.shape[3]:
        v = F.pad(v, (0, q.shape[3] - width))
    sinks = None if s_aux is None else s_aux.float()
    if documents is not None:
        out = documents.attend(q, k, v, sinks, mask, scaling, softcap)
        return out[..., :width].contiguous(), None
    out = attention(
        q, k, v, mask, backend=backend, scale=scaling, sinks=sinks, softcap=softcap, **options
    )
    return out[..., :width].contiguous(), None


def refuse_chunks(module: nn.Module, keys: int) -> None:
    """Raise ValueError for layers that see chunks of more tokens than one, as in Llama 4."""
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunk is not None and keys > chunk:
        raise ValueError(
            f"attention_chunk_size={chunk}: longctx has no chunks; give at most {chunk} tokens"
        )


_documents = WeakTensorKeyDictionary()  # position_ids or cu_seq_lens_q → the mask by window


def mask_of(
    attention_mask: Tensor | None,
    queries: int,
    keys: int,
    window: int | None,
    others: dict[str, Any],
) -> Mask:
    """Return the mask of a call: packed documents, or a padded batch that reads a cache."""
    if queries < keys:
        if attention_mask is None:
            return Mask.causal(window)
        return after_padding(attention_mask[:, -keys:], queries, window)
    source = others.get("cu_seq_lens_q")
    is_lengths = source is not None
    if not is_lengths:
        source = others.get("position_ids")
    if source is None and queries > 1:
        raise ValueError(
            "the layers of this model pass no position_ids to their attention, so longctx does not "
            "know its documents; use another attention"
        )
    if source is None:
        return Mask.causal(window)
    by_window: dict[int | None, Mask] = _documents.setdefault(source, {})
    if window not in by_window:
        numbers = document_of_each(source, queries) if is_lengths else document_numbers(source)
        by_window[window] = Mask.documents(numbers, window)
    return by_window[window]


def document_numbers(position_ids: Tensor) -> Tensor:
    """Return the number of each token's document, (B, T): positions restart in each.

    position_ids is (B, T), or (3, B, T) for text among images.
    """
    positions = position_ids[0] if position_ids.ndim == 3 else position_ids
    begins = torch.diff(positions, dim=1, prepend=positions[:, :1] - 1) != 1
    return begins.cumsum(1)


def document_of_each(offsets: Tensor, tokens: int) -> Tensor:
    """Return the number of each token's document, (1, T), from the `offsets` (documents + 1,)."""
    places = torch.arange(tokens, device=offsets.device)
    return torch.bucketize(places, offsets[1:].to(places.dtype), right=True)[None]


def after_padding(attention_mask: Tensor, queries: int, window: int | None) -> Mask:
    """Return causal intervals that leave out padding before the text; attention_mask is (B, Tk)."""
    keys = attention_mask.shape[1]
    is_text = attention_mask.bool()
    first = is_text.int().argmax(1, keepdim=True)
    last = torch.arange(keys - queries, keys, device=is_text.device)[None]
    begin = first.expand(-1, queries)
    if window is not None:
        begin = torch.maximum(begin, last - window + 1)
    return Mask.intervals(begin.int(), last.expand_as(begin).int())


def padding_alone(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """Return the (B, Tk) mask of a padded batch, None if it has no padding: transformers calls this
    where it would make a mask of all pairs.
    """
    if attention_mask is None or attention_mask.ndim != 2 or bool(attention_mask.all()):
        return None
    return attention_mask


for _name, _backend in BACKENDS.items():
    AttentionInterface.register(_name, partial(attend, backend=_backend))
    AttentionMaskInterface.register(_name, padding_alone)


@contextmanager
def implementation(model: Any, name: str, layers: int | None = None) -> Iterator[None]:
    """Let `model` compute its first `layers` layers, or all, with attention `name` for a while."""
    config = model.config
    before = config._attn_implementation, config.num_hidden_layers
    try:
        config._attn_implementation = name
        config.num_hidden_layers = layers or before[1]
        yield
    finally:
        config._attn_implementation, config.num_hidden_layers = before


def layers_to_check(config: Any) -> int:
    """Return how many of the first layers hold every kind of layer, two at least."""
    kinds = getattr(config, "layer_types", None) or []
    needed = [kinds.index(kind) + 1 for kind in set(kinds)]
    return min(config.num_hidden_layers, max([2, *needed]), max(2, LAYERS))
