"""A GPT that continues texts: all of their tokens in one forward, then token after token.

The prompts are packed into one sequence like documents, so different lengths cost no padding. Their
keys and values stay in a cache. From then on a forward is of one token per prompt, which attends to
the cache. On a GPU it is captured in a CUDA graph once and replayed, since its launches take a CPU
longer. A mixer in place of attention keeps a state of each text, see `Mixer.step`.

If the backend is exact, the cache is read by its formula (longctx/attention/naive.py), which a
kernel computes on a GPU. Others bring a `decode` of their own. If a layer has none, each new token
computes its whole text again.

If the frequencies of RoPE depend on the length of the input (dynamic, longrope), they follow it
token by token and the keys before keep theirs, as in transformers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.attention import Attention, Mask
from longctx.attention.context_parallel import Context
from longctx.attention.naive import by_triton, splits_keys
from longctx.model.gpt import GPT
from longctx.model.mixer import Mixer
from longctx.model.offload import print_once
from longctx.model.recompute import in_tiles
from longctx.model.rope import Angles, Rope, frequencies


class Decoder:
    """`model`, in eval mode, on `sequences` texts of at most `length` tokens each, prompt included.

    `graphs`: replay a CUDA graph; None: on a GPU. Weights sharded over ranks are gathered block by
    block, which a graph cannot do. As many other prompts replay the same graph: keys, values and
    other states have room for `length` tokens from the beginning. Nothing behind the tokens of a
    text is ever read.
    """

    def __init__(self, model: GPT, sequences: int, length: int, graphs: bool | None = None) -> None:
        self.model = model
        weight = model.embed.weight
        self.device, kind = weight.device, weight.device.type
        autocasts = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocasts else weight.dtype
        attentions = [block.attention for block in model.blocks]
        mixers = {layer: x for layer, x in enumerate(attentions) if isinstance(x, Mixer)}
        layers = [layer for layer in range(model.config.layers) if layer not in mixers]
        self.attends: dict[int, Attention] = {}
        for layer in layers:
            own = attentions[layer].attend
            score = own.options if "score" in own.options else None  # naive has it, too
            self.attends[layer] = Attention("naive", score) if own.backend.exact else own
        attends, has = self.attends.values(), model.config.block(0).attention.required()["scores"]
        self.splits_keys = all(x.name == "naive" and not x.options for x in attends)
        heads = [model.config.blocks[layer].attention.model for layer in layers]
        self.splits_keys &= all(splits_keys(self.device, dtype, x.head_size, has) for x in heads)
        slow = [f"model.mixer={x.part.mixer}" for x in mixers.values() if not x.decodes]
        slow += [f"attention={x.name}" for x in attends if not x.decodes]
        self.decodes = not slow
        for setting in slow:
            print_once(f"{setting} has no decoding: each new token computes its text again")
        self.sequences, self.length, self.dtype = sequences, length, dtype
        self.states: dict[int, Any] = {}  # of layers: caches, or what a mixer has
        self.windows = [model.config.window_of(layer) for layer in range(model.config.layers)]
        captures = self.decodes and all(x.description.capturable for x in attends)
        captures &= not any(block.away.on_host for block in model.blocks)
        self.graphs = captures and (kind == "cuda" if graphs is None else graphs)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.texts: list[list[int]] = []  # if their tokens are read anew
        self.lengths: list[int] = []
        self.ends = torch.zeros(sequences, dtype=torch.int64, device=self.device)  # the same
        self.tokens = torch.zeros(sequences, dtype=torch.int64, device=self.device)
        # Buffers of ropes that follow the length, for a replayed graph to read
        ropes = [rope for rope in model.ropes if rope.follows_length]
        self.angles: dict[Rope, Angles] = {x: x(self.ends[:, None]) for x in ropes}

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return logits (B, V) after each of the `prompts`, with one token at least each."""
        # The lm_head is cast once, not for every token; a graph reads this tensor
        head = self.model.lm_head_weight.to(self.dtype)
        self.head: Tensor = head if self.graph is None else self.head.copy_(head)
        lengths = [len(prompt) for prompt in prompts]
        assert len(prompts) == self.sequences and 0 < min(lengths) and max(lengths) <= self.length
        N, ids = sum(lengths), torch.tensor([token for prompt in prompts for token in prompt])
        documents = torch.arange(len(prompts)).repeat_interleave(torch.tensor(lengths))
        mask = Mask.documents(documents[None]) if len(prompts) > 1 else Mask.causal()
        mask = mask.bind(1, N, N, self.device)
        shards = Context().shards(mask, N)
        masks = self.model.masks(mask, shards, 1)
        slots = documents.to(self.device) * self.length + mask.positions(1, N, self.device)[0]
        angles = self.model.angles(mask, shards, (1, N), self.device)

        # In tiles always, which costs nothing without gradients: an MLP over 1M tokens is 80 GiB.
        tile = self.model.memory.mlp_tile or 32768

        def forward(layer: int, block: Any, x: Tensor) -> Tensor:
            attention = block.attention
            tensors = in_tiles(block.before, tile, (x, *angles[layer]))
            if attention.cached is None and self.decodes:
                out, state = attention.prefill(*tensors, masks[layer])
                for old, new in zip(self.states.setdefault(layer, state), state, strict=True):
                    old.copy_(new)
            else:
                out = attention(*tensors, masks[layer])
            if attention.cached is not None and self.decodes:
                self._write(layer, slots, tensors[attention.cached])
            return in_tiles(block.after, tile, (x, out))[0]

        x = self._through_blocks(ids[None].to(self.device), forward)
        self.texts, self.lengths = [list(prompt) for prompt in prompts], lengths
        self.ends.copy_(torch.tensor(lengths))
        return self._logits(x[0, torch.tensor(lengths).cumsum(0).to(self.device) - 1])

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Return logits (B, V) after `tokens` (B,); the next call may overwrite them."""
        if not self.decodes:
            new = tokens.tolist()
            return self.prefill([[*text, x] for text, x in zip(self.texts, new, strict=True)])
        self.lengths = [length + 1 for length in self.lengths]
        assert max(self.lengths) <= self.length
        self.tokens.copy_(tokens)
        for rope, buffers in self.angles.items():
            own = torch.stack([frequencies(rope.spec, length)[0] for length in self.lengths])
            angles = rope(self.ends[:, None], own[:, None].to(self.device))
            for buffer, angle in zip(buffers, angles, strict=True):
                buffer.copy_(angle)
        if self.graph is not None:
            self.graph.replay()
            return self.logits
        logits = self._one_token()
        # The first step ran eagerly, so its kernels are compiled; a capture computes nothing
        if self.graphs:
            self.graph = torch.cuda.CUDAGraph()
            # thread_local: a thread may write a checkpoint meanwhile, which no graph depends on
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.logits: Tensor = self._one_token()
        return logits

    def _one_token(self) -> Tensor:
        """Return logits after `tokens`; wait for nothing, read nothing that changes but tensors."""
        positions = self.ends[:, None]
        angles = self.model.ropes.per_layer(lambda rope: self.angles.get(rope) or rope(positions))
        starts, last = torch.arange(self.sequences, device=self.device), positions.int()
        slots = self.length * starts + self.ends
        longest = self.length if self.graphs else max(self.lengths)
        first = {w: (last - ((w or self.length) - 1)).clamp(min=0) for w in set(self.windows)}
        masks = {w: Mask("intervals", first=first[w], last=last) for w in first}

        def forward(layer: int, block: Any, x: Tensor) -> Tensor:
            attention, tensors = block.attention, block.before(x, *angles[layer])
            if attention.cached is None:
                return block.after(x, attention.step(*tensors, *self.states[layer]))
            self._write(layer, slots, tensors[attention.cached])
            mask, caches = masks[self.windows[layer]], self.states[layer]
            seen = [cache[:, :longest] for cache in caches]
            if isinstance(attention, Mixer):
                return block.after(x, attention.step(*tensors, *seen, mask))
            keys, values = caches if self.splits_keys else seen
            compute = by_triton if self.splits_keys else self.attends[layer].decode
            queries = tensors[0].to(self.dtype)
            return block.after(x, compute(queries, keys, values, mask, attention.scores))

        x = self._through_blocks(self.tokens[:, None], forward)
        self.ends += 1
        return self._logits(x[:, 0])

    def _write(self, layer: int, slots: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write what a layer caches of tokens to `slots`: sequence · length + position."""
        if layer not in self.states:
            room = self.sequences, self.length
            # Not empty: naive multiplies unseen values by 0, and 0 · NaN is NaN
            self.states[layer] = [x.new_zeros(*room, *x.shape[2:]) for x in tensors]
        for state, new in zip(self.states[layer], tensors, strict=True):
            state.flatten(0, 1).index_copy_(0, slots, new.flatten(0, 1))

    def _through_blocks(self, tokens: Tensor, forward: Callable[..., Tensor]) -> Tensor:
        x = self.model.embedded(tokens).to(self.dtype)
        for layer, block in enumerate(self.model.blocks):
            x = block.calling(functools.partial(forward, layer), x)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        return self.model.logits(self.model.norm(x), self.head)


def decoder_of(model: GPT, sequences: int, length: int, graphs: bool | None = None) -> Decoder:
    return (model.decoder or Decoder)(model, sequences, length, graphs)


def continuations(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    limit: int,
    choose: Callable[[Tensor], Tensor],
    ends: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, `limit` times; None if a token of `ends` has ended it.

    `choose` picks tokens (B,) from logits (B, V). It stops early if all have ended; without
    `ends` it never does, as ranks that compute together need it. A GPU computes the next step
    while tokens are read and shown.
    """
    logits, going = decoder.prefill(prompts), [True] * len(prompts)
    copied = torch.cuda.Event() if decoder.device.type == "cuda" else None
    for n in range(limit):
        tokens, last = choose(logits), n + 1 == limit
        # Into page-locked memory, and waited for alone: not for the step that follows it
        arrived = tokens.to("cpu", non_blocking=True)
        if copied is not None:
            copied.record()
            if not last:
                logits = decoder.step(tokens)
            copied.synchronize()
        chosen: list[int] = arrived.tolist()
        yield [token if goes else None for token, goes in zip(chosen, going, strict=True)]
        going = [goes and token not in ends for token, goes in zip(chosen, going, strict=True)]
        if last or not any(going):
            return
        if copied is None:
            logits = decoder.step(tokens)


@dataclass
class Sampler:
    """Chooses tokens for the texts of these `numbers`; with a `temperature` of 0 the likeliest.

    top_k: only the k likeliest tokens. top_p: only the fewest tokens that together have this
    probability (nucleus sampling, arXiv 1904.09751). As in transformers, temperature comes first,
    then top_k. Chance depends on the seed and the text's number alone, whatever texts share its
    batch.
    """

    numbers: Sequence[int]
    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        self.random = [random.Random(f"sample {self.seed} {number}") for number in self.numbers]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return tokens (B,) int64, of logits (B, V)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        # 24 bits: times a sum in fp64 they are never rounded up to the sum itself
        chance = [row.getrandbits(24) / 2**24 for row in self.random]
        sums = self.probabilities(logits).double().cumsum(-1)
        at = torch.tensor(chance, dtype=torch.float64).to(logits.device)[:, None] * sums[:, -1:]
        chosen = torch.searchsorted(sums, at, right=True)[:, 0]
        # NaN in logits finds no place in the sums; a token of the vocabulary is shown all the same
        return chosen.clamp(max=logits.shape[-1] - 1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return (B, V) in fp32; 0 for tokens that top_k and top_p leave out."""
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # 0 at most: no inf
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        p = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = p.sort(dim=-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # those before it suffice
            p = torch.zeros_like(p).scatter_(-1, order, ordered.masked_fill(beyond, 0.0))
            p = p / p.sum(-1, keepdim=True)
        return p
