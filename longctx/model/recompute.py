"""Activation checkpointing of blocks: backward runs them again, in tiles of tokens, but with flash
not their attention.

A block is token by token but for attention:

    q, k, v = before(x),   out = attention(q, k, v),   y = after(x, out)

So x, out and attention's lse, the saved activations, are enough for its gradients: `after` and
`before` run again, tile by tile, and attention's backward takes out and lse as they are. A backend
without such a backward (all but flash) runs its forward again.

A mixer in place of attention runs its forward again too, for all tokens and heads at one time.

With memory.keep_every=n only the x of every n-th block is saved: the others are after(x, out) of
the block before, which needs no attention either. Gradients of weights are added up over the tiles
in the weights' precision, fp32 at least. Compare activation checkpointing (arXiv 1604.06174) and
tiled computation in ALST (arXiv 2506.13996).
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.attention import Mask
from longctx.config.layout_config import MemoryConfig, tile_size
from longctx.model.experts import balancing, running
from longctx.model.mixer import Mixer, widened
from longctx.model.offload import Away, HostBuffers, SavedTensors, present
from longctx.model.rope import Angles

Tokens = tuple[Tensor, ...]  # each (1, B·T, ...): the tokens of all rows, one after another
COMPILED = deque[Any](maxlen=1)  # by torch.compile, since `collect_after_compiling`


def collect_after_compiling() -> None:
    """Free the tensors that torch.compile leaves in cycles (torch 2.11), such as 3 GiB of 8."""
    if COMPILED:
        COMPILED.clear()
        gc.collect()


def checkpointed_blocks(
    blocks: Sequence[Any],
    x: Tensor,
    angles: Sequence[Angles],
    masks: Sequence[Mask],
    memory: MemoryConfig,
) -> Tensor:
    """Return x (B, T, C) after `blocks`, each with its angles and mask: memory.recompute=block."""
    tape = _Tape(blocks, x.shape, angles, masks, memory, x.device)
    x = x.reshape(1, -1, x.shape[-1])
    for layer, block in enumerate(blocks):
        x = block.calling(lambda own, x, at: _Block.apply(x, tape, at, *_trained(own)), x, layer)
    collect_after_compiling()
    return x.view(tape.shape)


def forward_in_tiles(
    block: Any, x: Tensor, angles: Angles, mask: Mask, memory: MemoryConfig
) -> Tensor:
    """Return block(x, angles, mask) without gradients; outside attention, a tile at a time."""
    tape = _Tape([block], x.shape, [angles], [mask], memory, x.device)
    flat = x.reshape(1, -1, x.shape[-1])
    return tape.after(0, flat, tape.attend(0, flat)["out"]).view(x.shape)


@dataclass
class _Tape:
    """What the blocks of one forward pass share, and the activations saved for its backward."""

    blocks: Sequence[Any]
    shape: torch.Size  # B, T, C
    angles: Sequence[Angles]  # of each block, (B, T, 1, D/2)
    masks: Sequence[Mask]
    memory: MemoryConfig
    device: torch.device
    saved: dict[int, SavedTensors] = field(default_factory=dict)
    # Made again in backward: outputs of attention, and the input of the last block without one
    outputs: dict[int, SavedTensors] = field(default_factory=dict)
    held: SavedTensors | None = None

    def __post_init__(self) -> None:
        self.tile, self.every = self.memory.mlp_tile or 0, self.memory.keep_every or 1  # 0: all
        device = self.device.type
        self.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self.balance = running()
        # (1, B·T, 1, D/2); layers share their angles, and so the views of them
        flat = {id(own): tuple(x.flatten(0, 1)[None] for x in own) for own in self.angles}
        self.angles = [flat[id(own)] for own in self.angles]
        # Short windows cost least
        windows = [mask.window or math.inf for mask in self.masks]
        order = sorted(range(len(windows)), key=windows.__getitem__)
        self.attends_again = order[: round((self.memory.attention_again or 0.0) * len(order))]
        # Then each tile and group of heads takes its part; else blocks come to the device
        self.reads_host = bool(self.memory.heads_at_once and self.memory.offload)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Bring back autocast and balance of the forward pass, parts of which run again."""
        # No cache: a weight cast while gradients were off would be taken for one with a gradient
        with torch.autocast(*self.autocast, cache_enabled=False), balancing(self.balance):
            yield

    def groups(self, layer: int) -> Iterator[tuple[slice, slice]]:
        """Yield the query heads and the key heads of a block that are computed at one time."""
        collect_after_compiling()
        attention = self.blocks[layer].attention
        each = self.memory.heads_at_once or attention.kv_heads
        shared = attention.heads // attention.kv_heads
        for first in range(0, attention.kv_heads, each):
            yield slice(first * shared, (first + each) * shared), slice(first, first + each)

    def of_heads(self, layer: int, queries: slice, keys: slice, x: Tensor, *outs: Tensor) -> Tokens:
        """Return q, k and v of block `layer`, and `outs`, of some heads.

        Each group projects all heads of a tile: so every kind of layer can, with the same bits.
        """
        block, angles = self.blocks[layer], self.angles[layer]
        if not self.memory.heads_at_once:
            return (*self.before(layer, x), *outs)

        def of_tile(x: Tensor, *others: Tensor) -> Tokens:
            q, k, v = block.before(x, *others[: len(angles)])
            own = q[:, :, queries], k[:, :, keys], v[:, :, keys]
            outs = (out[:, :, queries] for out in others[len(angles) :])
            return tuple(part.contiguous() for part in (*own, *outs))

        return in_tiles(of_tile, self.tile, (x, *angles, *outs), self.device)

    def before(self, layer: int, x: Tensor) -> Tokens:
        return in_tiles(self.blocks[layer].before, self.tile, (x, *self.angles[layer]), self.device)

    def after(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        return in_tiles(self.blocks[layer].after, self.tile, (x, out), self.device)[0]

    def attend(self, layer: int, x: Tensor) -> dict[str, Tensor]:
        """Return attention's output of block `layer` and, if its backward takes that, its lse."""
        attention, out, lse = self.blocks[layer].attention, None, None
        if isinstance(attention, Mixer):
            with torch.no_grad():
                mixed = attention(*map(self.rows, self.before(layer, x)), self.masks[layer])
            return {"out": mixed.reshape(1, -1, *mixed.shape[2:])}
        for queries, keys in self.groups(layer):
            q, k, v = (self.rows(t) for t in self.of_heads(layer, queries, keys, x))
            scores = attention.scores.of_heads(queries.start, q.shape[2])
            results = attention.attend.with_lse(q, k, v, self.masks[layer], scores)
            out = _placed(out, results[0], 2, queries, attention.heads)
            lse = _placed(lse, results[1], 1, queries, attention.heads)
            del q, k, v, results  # free before the next group
        assert out is not None and lse is not None
        results = {"out": out.reshape(1, -1, *out.shape[2:])}
        return results | ({"lse": lse} if attention.attend.description.has_backward else {})

    def rows(self, x: Tensor) -> Tensor:
        """Return (B, T, H, D), of x (1, B·T, H, D)."""
        return x.view(*self.shape[:2], *x.shape[2:])

    def save(self, layer: int, x: Tensor, results: dict[str, Tensor]) -> None:
        """Save the results of attention, unless made again, and the input of each keep_every-th."""
        tensors = {} if layer in self.attends_again else dict(results)
        if layer % self.every == 0:
            tensors["x"] = x
        self.saved[layer] = self.holder(layer, layer, tensors)

    def holder(self, layer: int, slot: int, tensors: dict[str, Tensor]) -> SavedTensors:
        """Return `tensors` of block `layer`, on the host if the block is offloaded; below 0 `slot`
        is that of tensors made again, on the host if backward reads them there.
        """
        offload = self.memory.offload or 0.0
        is_offloaded = layer < round(offload * len(self.blocks)) if slot >= 0 else self.reads_host
        has_buffers = is_offloaded and tensors
        buffers = HostBuffers.of(self.blocks[0], self.device, slot) if has_buffers else None
        return SavedTensors(tensors, buffers)

    def tensors(self, saved: SavedTensors) -> dict[str, Tensor]:
        return saved.tensors(brings=not self.reads_host)

    def input(self, layer: int) -> Tensor:
        """Return x of block `layer`: saved, or recomputed from tensors of the blocks before."""
        first = layer - layer % self.every
        x = self.tensors(self.saved[first])["x"]
        for lower in range(first, layer):
            # FSDP has resharded it; its own backward comes next, and shards it again
            self.blocks[lower].unshard()
            with present(self.blocks[lower].away, self.blocks[lower + 1].away):
                y = self.after(lower, x, self.output(lower, x)["out"])
            self.held = None  # its place is free
            self.held = self.holder(lower + 1, -1, {"x": y})
            x = self.tensors(self.held)["x"]
            del y
        return x

    def output(self, layer: int, x: Tensor) -> dict[str, Tensor]:
        """Return the results of block `layer`'s attention: saved, or made again once."""
        saved = self.tensors(self.saved[layer])
        if "out" not in saved:
            if layer not in self.outputs:
                slot = -2 - layer % self.every
                self.outputs[layer] = self.holder(layer, slot, self.attend(layer, x))
            saved = self.tensors(self.outputs[layer])
        return saved


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: _Tape, layer: int, *weights: Tensor) -> Tensor:
        ctx.tape, ctx.layer, ctx.weights = tape, layer, weights
        with tape.surroundings():
            results = tape.attend(layer, x)
            y = tape.after(layer, x, results["out"])
        tape.save(layer, x, results)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tape, layer = ctx.tape, ctx.layer
        assert layer in tape.saved, "the gradients of this forward pass were already taken"
        if layer and not tape.reads_host:
            tape.saved[layer - 1].prefetch()
        sums = _Sums(tape.blocks[layer], ctx.weights)
        with tape.surroundings():
            x = tape.input(layer)
            # The block below begins at the last input that was saved
            ahead = tape.blocks[layer - 1 - (layer - 1) % tape.every].away if layer else None
            with present(tape.blocks[layer].away, ahead):
                dx = _block_backward(tape, layer, x, dy.contiguous(), sums)
        del tape.saved[layer], ctx.weights
        tape.outputs.pop(layer, None)
        tape.held = None
        if not tape.saved:  # what torch.compile traced in the first backward keeps its tape alive
            tape.blocks = tape.angles = tape.masks = ()
        return dx, None, None, *sums.gradients()


def _block_backward(tape: _Tape, layer: int, x: Tensor, dy: Tensor, sums: _Sums) -> Tensor:
    """Return dx of block `layer`, from its input x; its weights' gradients go into `sums`."""
    # In tiles dx takes the memory of dy, which the block above made and nobody else reads
    block, saved = tape.blocks[layer], tape.output(layer, x)
    out = saved["out"]
    one_tile = x.shape[1] <= (tape.tile or x.shape[1]) and not tape.memory.heads_at_once

    # after: dx along the residual stream, and do of attention's output
    after = partial(block.after, needs_value=False)
    into = None if one_tile else [dy, torch.empty_like(out, device=dy.device)]
    dx, do = gradients_in_tiles(after, tape.tile, (x, out), (), (dy,), sums, into)

    # q, k and v again; in one tile with their graph, which serves the last step
    leaf = x.detach().requires_grad_(one_tile)
    if one_tile:
        with torch.enable_grad():
            qkv = block.before(leaf, *tape.angles[layer])

    # attention
    if isinstance(block.attention, Mixer):
        if not one_tile:
            qkv = tape.before(layer, x)
        dqkv = _mixer_backward(tape, layer, do, qkv, sums)
    else:
        dqkv = _attention_backward(tape, layer, x, do, saved, qkv if one_tile else None, sums)
    del do, out, saved, into

    # before
    if one_tile:
        outputs, leaves = (leaf, *qkv), (leaf, *sums.weights)
        every = torch.autograd.grad(outputs, leaves, (dx, *dqkv), allow_unused=True)
        sums.add(every[1:])
        return every[0]
    before = lambda x, *angles: (x, *block.before(x, *angles))  # noqa: E731
    angles, gradients = tape.angles[layer], (dx, *dqkv)
    return gradients_in_tiles(before, tape.tile, (x,), angles, gradients, sums, [dx])[0]


def _attention_backward(
    tape: _Tape, layer: int, x: Tensor, do: Tensor, saved: dict[str, Tensor], qkv: Any, sums: _Sums
) -> Tokens:
    """Return dq, dk and dv of block `layer`; without `qkv` groups of heads make them again."""
    attention, out, lse = tape.blocks[layer].attention, saved["out"], saved.get("lse")
    scores = attention.scores
    dqkv: Tokens = do, None, None  # type: ignore[assignment]  # of groups dq takes do's memory
    dsinks = None if scores.sinks is None else torch.zeros_like(scores.sinks)
    counts = attention.heads, attention.kv_heads, attention.kv_heads
    for queries, keys in tape.groups(layer):
        own = tape.of_heads(layer, queries, keys, x, out) if qkv is None else (*qkv, out)
        own_lse = None if lse is None else lse[:, queries].to(do.device, non_blocking=True)
        q, k, v, own_out = (tape.rows(t.detach()) for t in own)
        gradients = attention.attend.backward(
            tape.rows(do[:, :, queries]),
            (q, k, v, own_out, own_lse),
            tape.masks[layer],
            scores.of_heads(queries.start, q.shape[2]),
        )
        if dsinks is not None:
            dsinks[queries] = gradients[3]
        parts = (t.reshape(1, -1, *t.shape[2:]) for t in gradients[:3])
        each = zip(dqkv, parts, (queries, keys, keys), counts, strict=True)
        dqkv = tuple(_placed(whole, part, 2, at, n) for whole, part, at, n in each)
        # free before the next group
        del own, own_lse, q, k, v, own_out, gradients, parts, each
    sums.add([dsinks if weight is scores.sinks else None for weight in sums.weights])
    return dqkv


def _mixer_backward(tape: _Tape, layer: int, do: Tensor, tensors: Tokens, sums: _Sums) -> Tokens:
    """Return gradients of the `tensors` that block `layer`'s mixer takes; run it again."""
    leaves = [tape.rows(t.detach()).requires_grad_() for t in tensors]
    with torch.enable_grad():
        out = tape.blocks[layer].attention(*leaves, tape.masks[layer])
    inputs = *leaves, *sums.weights
    found = torch.autograd.grad(out, inputs, do.reshape(out.shape), allow_unused=True)
    sums.add(found[len(leaves) :])
    each = zip(found, tensors, strict=False)
    return tuple(torch.zeros_like(t) if g is None else g.reshape(t.shape) for g, t in each)


def in_tiles(
    function: Callable[..., Any], tile: int, inputs: Tokens, device: torch.device | None = None
) -> Tokens:
    """Return function(*inputs) without gradients, `tile` tokens (0: all) at a time, on `device`."""
    with torch.no_grad():
        outputs: Tokens = ()
        tokens = inputs[0].shape[1]
        for at, own in _arriving_tiles(tile, inputs, device or inputs[0].device):
            parts = _tuple(function(*own))
            if at == slice(0, tokens):  # one tile
                return parts
            outputs = outputs or tuple(p.new_empty(1, tokens, *p.shape[2:]) for p in parts)
            for output, part in zip(outputs, parts, strict=True):
                output[:, at] = part
            del own, parts, part  # the next tile takes their memory
    return outputs


def gradients_in_tiles(
    function: Callable[..., Any],
    tile: int,
    inputs: Tokens,
    constants: Tokens,
    gradients: Tokens,
    sums: _Sums,
    into: list[Tensor] | None,
) -> Sequence[Tensor]:
    """Return gradients of `inputs`, given the `gradients` of function(*inputs, *constants), in the
    tensors `into`, of which one may be among `gradients`; those of the weights go into `sums`.
    """
    for at, own in _arriving_tiles(tile, inputs, gradients[0].device):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in own]
            outputs = _tuple(function(*leaves, *(x[:, at] for x in constants)))
        douts = [g[:, at] for g in gradients]
        every = torch.autograd.grad(outputs, (*leaves, *sums.weights), douts, allow_unused=True)
        sums.add(every[len(leaves) :])
        if into is None:  # one tile
            return every[: len(leaves)]
        for target, part in zip(into, every, strict=False):
            target[:, at] = part
        # The next tile takes their memory: 464 MiB of 1b with tiles of 32,768 tokens
        del own, leaves, outputs, douts, every, part
    return into or ()


class _Sums:
    """Gradients of `weights`, summed over tiles; RuntimeError unless they still are the block's."""

    def __init__(self, block: Any, weights: Sequence[Tensor]) -> None:
        own = {id(weight) for weight in block.parameters()}
        if any(id(weight) not in own for weight in weights):
            left = "the weights of this forward pass have left the model before backward"
            raise RuntimeError(f"{left}; with torch.func.functional_call use memory=fast")
        self.weights = weights
        self.sums: list[Tensor | None] = [None] * len(weights)

    def add(self, parts: Sequence[Tensor | None]) -> None:
        for n, (total, part) in enumerate(zip(self.sums, parts, strict=True)):
            if part is not None:
                self.sums[n] = widened(part) if total is None else total.add_(part)

    def gradients(self) -> list[Tensor | None]:
        """Return the sums, in the precision of the weights."""
        pairs = zip(self.sums, self.weights, strict=True)
        return [None if total is None else total.to(x.dtype) for total, x in pairs]


def _arriving_tiles(
    tile: int, inputs: Tokens, device: torch.device
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield each tile and its tokens of all `inputs` on `device`, the next one on its way."""
    # Of one size but for the last: compiled code depends on it
    tokens = inputs[0].shape[1]
    size = tile_size(tokens, tile or tokens)

    def begun(start: int) -> tuple[slice, list[Tensor], Away]:
        at = slice(start, min(start + size, tokens))
        sources = [x[:, at] for x in inputs]
        away = Away({n: x for n, x in enumerate(sources) if x.device.type != device.type}, device)
        away.prefetch()
        return at, sources, away

    coming = map(begun, range(0, tokens, size))
    following = next(coming, None)
    while following is not None:
        collect_after_compiling()
        at, sources, away = following
        tensors = list(map(away.tensors().get, range(len(sources)), sources))
        del away
        following = next(coming, None)
        yield at, tensors
        del tensors  # the tile after the next takes their memory


def _placed(whole: Tensor | None, part: Tensor, dim: int, heads: slice, count: int) -> Tensor:
    """Return `part` as these of `count` heads of `whole`, which is made unless it is there."""
    if part.shape[dim] == count:
        return part
    if whole is None:
        whole = part.new_empty(*part.shape[:dim], count, *part.shape[dim + 1 :])
    whole.narrow(dim, heads.start, part.shape[dim]).copy_(part)
    return whole


def _trained(block: Any) -> list[Tensor]:
    return [p for p in block.parameters() if p.requires_grad]


def _tuple(outputs: Any) -> Tokens:
    return outputs if isinstance(outputs, tuple) else (outputs,)
