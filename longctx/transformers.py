"""longctx's attention in models of transformers, from release 5 on:

    import longctx.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longctx")

"longctx" is attention=flash; "longctx_sdpa", "longctx_naive" and so on are the other backends.
Documents come from position_ids that restart, or from cu_seq_lens_q. No mask of all pairs exists.
Windows, sinks, softcap and scale come from the layer. `check(model)` compares packed documents with
eager attention on each alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
except ImportError as error:
    remedy = "pip install 'longctx-train[transformers]'"
    raise ImportError(f"longctx.transformers needs transformers 5 or later: {remedy}") from error

from longctx import untrusted
from longctx.attention import Attention, Mask, Scores, attention
from longctx.attention.registry import registered
from longctx.config.fields import refuse

NAME = "longctx"
BACKENDS = {NAME: "flash"} | {f"{NAME}_{name}": name for name in registered()}
# Arguments of layers that would change the result, or ask for another
UNKNOWN = ["position_bias", "indices", "block_indices", "sinks", "head_mask", "cache"]
UNKNOWN += ["output_attentions"]
PADDING_INSIDE = "attention_mask has padding inside a text; move it to an end"
# model_types whose packed documents `check` let pass, of small models with random weights
TRIED = frozenset((Path(__file__).parent / "hf" / "tried.txt").read_text().split())
LAYERS = 12  # that `check` computes at most
LONG = 4096  # tokens of a window that `check` leaves out
TOLERANCE = 1e-4
MAMBA_TOKENS = 61_000  # of a sequence; mamba-ssm counts on in 32 bits (mamba#1015)


MaskOf = Callable[[int | None], Mask]  # of a layer's window


class Documents:
    """The documents of a batch, and the mask of each window; modules that have one as `documents`
    ask it, not their arguments. Ranks may share the sequences, see `Shards`.
    """

    def __init__(self, backend: str, options: dict[str, Any]) -> None:
        self.caller = Attention(backend, options)
        # Attention of a recomputed layer, which saves its output
        self.attend_and_save: Callable[..., Tensor] | None = None
        self.calls = 0  # of attention, so that a model without any is noticed
        self.begin(None)

    def begin(self, mask: Mask | None, shards: Any = None) -> None:
        """Take the bound `mask` of the next forward; None: keys from a cache, one document."""

        @functools.cache
        def mask_of(window: int | None) -> Mask:
            if mask is None:
                return Mask.causal(window)
            windowed = mask if window is None else mask.windowed(window)
            return windowed if shards is None else shards.mask(windowed)

        # Of layers with a window, in the forward that runs or is recomputed
        self.mask_of: MaskOf = mask_of

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> Tensor:
        """Return attention's output (B, T, H, D), saved for recomputation if a layer keeps it."""
        self.calls += 1
        if self.attend_and_save is None or not self.caller.description.has_backward:
            return self.caller(q, k, v, mask, scores)
        return self.attend_and_save(q, k, v, scores, mask, self.caller)

    @contextmanager
    def attending(self, attend_and_save: Callable[..., Tensor], mask_of: MaskOf) -> Iterator[None]:
        """Call this for the attention of the layer that is computed in the block, with its masks:
        other forwards may have begun since the one that is recomputed.
        """
        before, self.mask_of, self.attend_and_save = self.mask_of, mask_of, attend_and_save
        try:
            yield
        finally:
            self.mask_of, self.attend_and_save = before, None


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
    """Attend as transformers calls it: query (B, H, T, D), key and value (B, Hkv, Tk, D or less)
    → (B, T, H, width of value). Raises ValueError for what would silently be left out.
    """
    refuse((dropout, f"attention_dropout={dropout}: longctx has none; set it to 0"))
    for name in UNKNOWN:
        is_given = others.get(name) is not None and others[name] is not False
        refuse((is_given, f"{name}: longctx has none; use another attention"))
    # a layer that passes None has no window, whatever its module says
    window = others.get("sliding_window", getattr(module, "sliding_window", None))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    # MLA: values are narrower than keys
    width = v.shape[3]
    if width < q.shape[3]:
        v = F.pad(v, (0, q.shape[3] - width))
    sinks = None if s_aux is None else s_aux.float()
    config = getattr(module, "config", None)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # a model of ours has its documents; others tell by their arguments
    documents: Documents | None = module.__dict__.get("documents")
    if documents is not None:
        mask = documents.mask_of(window) if is_causal else Mask.full()
        out = documents.attend(q, k, v, mask, Scores(scaling, softcap, sinks))
        return out[..., :width].contiguous(), None
    shape = None if attention_mask is None else tuple(attention_mask.shape)
    wanted = "give (B, T), which leaves out padding; documents come from position_ids"
    refuse((shape and len(shape) != 2, f"attention_mask of shape {shape}: {wanted}"))
    is_other = not is_causal or not getattr(config, "is_causal", True)
    refuse((is_other, "this attention is not causal, and longctx's is: use another attention"))
    chunk = getattr(config, "attention_chunk_size", None) or k.shape[1]
    problem = f"longctx has no chunks; give at most {chunk} tokens"
    refuse((k.shape[1] > chunk, f"attention_chunk_size={chunk}: {problem}"))
    mask = mask_of(config, q, k.shape[1], window, attention_mask, others)
    out = attention(q, k, v, mask, backend=backend, scale=scaling, sinks=sinks, softcap=softcap)
    return out[..., :width].contiguous(), None


# position_ids, cu_seq_lens_q or attention_mask → the masks of its forward by window and shape
_masks = WeakTensorKeyDictionary()


@torch.compiler.disable  # Mask reads counts on the host, once per forward and window
def mask_of(
    config: Any,
    q: Tensor,
    keys: int,
    window: int | None,
    attention_mask: Tensor | None,
    others: dict[str, Any],
) -> Mask:
    """Return the bound mask of causal attention: of packed documents, or of queries that continue
    a cache. Raises ValueError for packed documents if no model of this `config` was tried.
    """
    batch, queries = q.shape[:2]
    offsets, positions = others.get("cu_seq_lens_q"), others.get("position_ids")
    source = positions if offsets is None else offsets
    if attention_mask is not None:
        source = attention_mask  # `padding_alone` gives every forward one of its own
    elif queries < keys:
        return Mask.causal(window)
    # Without positions nobody knows where a document begins
    if source is None:
        message = "this model's attention gets no position_ids, so documents are not known: give "
        refuse((queries > 1, message + "cu_seq_lens_q, or use another attention"))
        return Mask.causal(window)
    # All layers of a forward share one mask
    by_shape: dict[Any, tuple[Mask, bool]] = _masks.setdefault(source, {})
    # it may be written to in place, and an inference tensor counts no versions
    content = source.int().cpu().numpy().tobytes() if source.is_inference() else source._version
    shape = (window, batch, queries, keys, content)
    if shape not in by_shape:
        if queries < keys:
            mask, is_packed = after_padding(source[:, -keys:], queries, window), False
        else:
            numbers = document_numbers(batch, queries, offsets, positions)
            is_packed = packs(numbers, attention_mask)
            if attention_mask is not None:
                numbers = numbers + padding_of(numbers, attention_mask)
            mask = Mask.documents(numbers, window)
        by_shape[shape] = mask.bind(batch, queries, keys, q.device), is_packed
    mask, is_packed = by_shape[shape]
    if is_packed:
        refuse_untried(config)
    return mask


# id → config of a model that `check` let pass
_checked: WeakValueDictionary[int, Any] = WeakValueDictionary()


def vouch(config: Any) -> None:
    """Let documents be packed in models of this `config`, which the caller has compared."""
    _checked[id(config)] = config


def refuse_untried(config: Any) -> None:
    """Raise ValueError unless packed documents are right in models of this `config`."""
    kind = getattr(config, "model_type", None)
    is_untried = kind not in TRIED and _checked.get(id(config)) is not config
    remedy = "longctx.transformers.check(model) tries them, and then lets them pass"
    problem = f"model_type={kind}: packed documents were not tried with it; {remedy}"
    refuse((is_untried, problem))


def document_numbers(
    batch: int, tokens: int, offsets: Tensor | None, positions: Tensor | None
) -> Tensor:
    """Return the number of each token's document, (B, T): from `offsets` (documents + 1,) in the
    flattened batch, else from `positions` (B or 1, T) that restart.
    """
    if offsets is not None:
        indices = torch.arange(batch * tokens, device=offsets.device).view(batch, tokens)
        return torch.bucketize(indices, offsets[1:].to(indices.dtype), right=True)
    shape = None if positions is None else tuple(positions.shape)
    refuse((len(shape or ()) != 2, f"position_ids of shape {shape}: give (B, T)"))
    assert positions is not None
    steps = torch.diff(positions, dim=1, prepend=positions[:, :1] - 1)
    return (steps != 1).cumsum(1).expand(batch, -1)


def packs(numbers: Tensor, attention_mask: Tensor | None) -> bool:
    """Return True if a document follows another in a sequence; padding follows none."""
    changes = numbers.diff(dim=1) != 0
    if attention_mask is not None:
        is_text = attention_mask.bool()
        changes &= is_text[:, 1:] & is_text[:, :-1]
    return bool(changes.any())


def padding_of(numbers: Tensor, attention_mask: Tensor) -> Tensor:
    """Return (B, T) to add to the `numbers` of documents, so that padding is one of its own."""
    is_text = attention_mask.bool()
    turns = is_text.diff(dim=1, prepend=is_text[:, :1])
    is_inside = numbers.diff(dim=1, prepend=numbers[:, :1] - 1) == 0
    refuse(((turns & is_text & is_inside & (is_text.cumsum(1) > 1)).any(), PADDING_INSIDE))
    return turns.cumsum(1)


def after_padding(attention_mask: Tensor, queries: int, window: int | None) -> Mask:
    """Return causal intervals that leave out padding; attention_mask is (B, Tk)."""
    is_text, keys = attention_mask.bool(), attention_mask.shape[1]
    first = is_text.int().argmax(1, keepdim=True)
    last = first + is_text.sum(1, keepdim=True) - 1
    # A chunk may have no text yet of a row
    has_text = is_text.any(1, keepdim=True)
    is_cut = has_text & (is_text.cumsum(1).argmax(1, keepdim=True) != last)
    refuse((is_cut.any(), PADDING_INSIDE))
    ends = torch.arange(keys - queries, keys, device=first.device)[None].minimum(last)
    begins = first.expand_as(ends)
    if window is not None:
        begins = torch.maximum(begins, ends - window + 1)
    return Mask.intervals(begins, ends)


@torch.compiler.disable
def padding_alone(
    *_: Any,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    **sizes: Any,
) -> Tensor | None:
    """Return the (B, Tk) mask of a padded batch, None if it has no padding: transformers calls this
    once per forward where it would make a mask of all pairs.

    Raises ValueError for models that change their causal mask, and for caches of a fixed size.
    """
    # Of an earlier forward: a broadcast, or NumPy, may have changed its tensors unseen by torch
    _masks.clear()
    positions = sizes.get("cache_position")  # before transformers 5.4
    begin, queries = sizes.get("q_offset", 0), sizes.get("q_length", 0)
    if positions is not None:
        begin, queries = positions[0], len(positions)
    is_changed, is_packed = traits_of(mask_function)
    if is_packed:  # Models may ask for a mask and have another attention than ours
        refuse_untried(sizes.get("config"))
    problem = "this model changes its causal mask, as for images or prefixes, and longctx does not"
    refuse((is_changed, f"{problem}: use another attention"))
    is_static = int(begin) + queries != sizes["kv_offset"] + sizes["kv_length"]
    problem = "longctx cannot read a static cache, which is longer than its text; use a dynamic one"
    refuse((is_static, f"cache_implementation: {problem}"))
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    refuse((len(shape) != 2, f"attention_mask of shape {shape}: give (B, T)"))
    return None if bool(attention_mask.all()) else attention_mask.clone()


def traits_of(mask_function: Callable[..., Any]) -> tuple[bool, bool]:
    """Return True if a mask is made of more than causality, windows, documents and padding, as of
    images, which may see their own future; and True if it has packed documents.
    """
    parts = [mask_function]
    for part in parts:  # which grows
        if getattr(part, "__module__", None) != masking_utils.__name__:
            return True, False
        for cell in part.__closure__ or ():
            inner = cell.cell_contents
            is_overlay = part.__qualname__.startswith("blockwise_overlay")
            if is_overlay and bool((inner >= 0).any()):
                return True, False
            parts += [x for x in (inner if isinstance(inner, tuple) else (inner,)) if callable(x)]
    is_packed = any(part.__qualname__.startswith("packed_sequence_mask") for part in parts)
    return False, is_packed and not torch.compiler.is_compiling()


for _name, _backend in BACKENDS.items():
    AttentionInterface.register(_name, partial(attend, backend=_backend))
    AttentionMaskInterface.register(_name, padding_alone)


@contextmanager
def implementation(model: Any, name: str, layers: int | None = None) -> Iterator[None]:
    """Let `model` compute its first `layers` layers, or all, with attention `name` for a while."""
    config = model.config.get_text_config()
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


def lengths_to_check(window: int | None, limit: int) -> list[int]:
    """Return the tokens of two documents, the first longer than a usual window."""
    first = (window or 0) + 29 if (window or 0) < LONG else 61
    return [max(2, min(limit, tokens)) for tokens in (first, 37)]


def refuse_broken_kernels(config: Any, tokens: int = 0) -> None:
    """Raise ValueError if an installed package computes layers of `config` wrongly, without a word,
    on this GPU or for sequences of so many `tokens`.
    """
    keys, kinds = config.to_dict(), getattr(config, "layer_types", None) or []
    has_mamba = "mamba" in config.model_type or any(key.startswith("mamba") for key in keys)
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    old = "linear_attention" in kinds and version_of("fla-core", "0.6") < Version("0.6")
    problem = "fla-core before 0.6.0: its gradients are wrong on Hopper GPUs"
    refuse((on_hopper and old, f"{problem}; pip install 'fla-core>=0.6.0', or leave it out"))
    overflows = has_mamba and tokens > MAMBA_TOKENS and version_of("mamba-ssm", "0") > Version("0")
    problem = f"mamba-ssm: its kernels overflow beyond {MAMBA_TOKENS:,} tokens, and a sequence has"
    refuse((overflows, f"{problem} {tokens:,}; give shorter ones, or leave mamba-ssm out"))


def version_of(package: str, absent: str) -> Version:
    """Return the version that is installed; `absent` if none is."""
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return Version(absent)


def check(model: Any) -> None:
    """Raise ValueError unless documents in one sequence have the logits that each has alone with
    transformers' eager attention, and none sees another. Then they may be packed in this model.
    """
    # Computes the first layers of a causal model. In fp32 the smallest mistake shows.
    config = model.config.get_text_config()
    name, kind = str(config._attn_implementation), config.model_type
    refuse((name not in BACKENDS, f'attn_implementation={name}: give "{NAME}" to check it'))

    def packed(documents: list[Tensor]) -> Tensor:
        positions = torch.cat([torch.arange(x.shape[1], device=x.device) for x in documents])
        logits: Tensor = model(
            input_ids=torch.cat(documents, dim=1), position_ids=positions[None], use_cache=False
        ).logits
        return logits

    longest = getattr(config, "max_position_embeddings", None) or LONG
    refuse_broken_kernels(config)
    lengths = lengths_to_check(getattr(config, "sliding_window", None), longest // 2)
    vouch(config)
    problem = "it cannot be computed"
    try:
        with untrusted.named(f"model_type={kind}", f"{problem}: {{}}", (Exception,)):
            try:
                problem, _ = differences(model, name, lengths, packed)
            # Layers that are counted elsewhere in the config, as Jamba's, are computed all
            except (IndexError, TypeError):
                problem, _ = differences(model, name, lengths, packed, config.num_hidden_layers)
    finally:
        if problem:
            del _checked[id(config)]
    refuse((problem, f"model_type={kind}: {problem}"))


def differences(
    model: Any,
    name: str,
    lengths: list[int],
    packed: Callable[[list[Tensor]], Tensor],
    layers: int | None = None,
) -> tuple[str, bool]:
    """Compare logits of random documents of these `lengths`: packed, and each alone. Return what is
    wrong, "" for nothing, and True if one document a sequence may be right.

    `packed` computes a sequence of documents with attention `name`, `model` a document with eager
    attention; both only the first `layers`, or so many that each kind is among them.
    """
    config, weight = model.config.get_text_config(), model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(3, config.vocab_size, (1, n), generator=generator).to(weight.device)
        for n in lengths
    ]
    # If other tokens in the first document change logits of the second, layers mix documents
    changed = [documents[0].flip(1), *documents[1:]]
    layers, training = layers or layers_to_check(config), model.training
    # Dropout and noise of routers would differ between the two
    model.eval()
    try:
        with torch.no_grad(), implementation(model, name, layers):
            ours, leaking = packed(documents), packed(changed)
        with torch.no_grad(), implementation(model, "eager", layers):
            theirs = [model(input_ids=x, use_cache=False).logits for x in documents]
    finally:
        model.train(training)
    others = slice(lengths[0], None)
    leak = relative(leaking[:, others], ours[:, others]) if len(lengths) > 1 else 0.0
    if not leak <= TOLERANCE:
        return (
            "its layers carry one document of a sequence into the next (logits change by "
            f"{leak:.0%}), as recurrent and convolutional layers do without the packages that "
            "transformers asks for; install (causal-conv1d, mamba-ssm, flash-linear-attention)"
        ), True
    # In 16 bits both round, each in its own order
    allowed = max(TOLERANCE, 8 * torch.finfo(weight.dtype).eps)
    off = relative(ours, torch.cat(theirs, dim=1))
    if off <= allowed:
        return "", True
    is_right_alone = relative(ours[:, : lengths[0]], theirs[0]) <= allowed
    alone = "packed documents are not supported, one document a sequence is right"
    remedy = alone if is_right_alone else "longctx does not support its layers"
    problem = f"logits differ from those of transformers' own attention by {off:.2%}"
    return f"{problem}, {allowed:.2%} is allowed; {remedy}", is_right_alone


def relative(x: Tensor, y: Tensor) -> float:
    """Return the largest difference of a token's logits x and y (1, T, V), relative to y."""
    x, y = x.float(), y.float()
    return float(((x - y).norm(dim=-1) / y.norm(dim=-1)).max())
