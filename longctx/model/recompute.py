"""Activation checkpointing of blocks: backward runs them again, in tiles of tokens, but with flash
not their attention.

A block is token by token but for attention:

    q, k, v = before(x),   out = attention(q, k, v),   y = after(x, out)

So x, out and attention's lse, the saved activations, are enough for its gradients: `after` and
`before` run again, tile by tile, and attention's backward takes out and lse as they are. A backend
without such a backward (all but flash) runs its forward again.

With memory.keep_every=n only the x of every n-th block is saved: the others are after(x, out) of
the block before, which needs no attention either. Gradients of weights are added up over the tiles
in the weights' precision, fp32 at least. Compare activation checkpointing (arXiv 1604.06174) and
tiled computation in ALST (arXiv 2506.13996).
"""

from __future__ import annotations

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
from longctx.model.offload import HostBuffers, SavedTensors
from longctx.model.rope import Angles

Tokens = tuple[Tensor, ...]  # each (1, B·T, ...): the tokens of all rows, one after another


def checkpointed_blocks(
    blocks: Sequence[Any],
    x: Tensor,
    angles: Sequence[Angles],
    masks: Sequence[Mask],
    memory: MemoryConfig,
) -> Tensor:
    """Return x (B, T, C) after `blocks`, each with its angles and mask: memory.recompute=block."""
    # Layers share their angles, and so the views of them
    flat = {id(pair): _flat(pair) for pair in angles}
    of_blocks = [flat[id(pair)] for pair in angles]
    tile, surroundings = memory.mlp_tile or 0, _Surroundings(x.device.type)
    tape = _Tape(blocks, x.shape, of_blocks, masks, memory, tile, surroundings)
    y = x.reshape(1, -1, x.shape[-1])
    for i, block in enumerate(blocks):
        y = block.calling(lambda own, y, i: _Block.apply(y, tape, i, *_trained(own)), y, i)
    return y.view(x.shape)


def checkpointed_mlp(block: Any, x: Tensor, angles: Angles, mask: Mask, tile: int) -> Tensor:
    """block(x, angles, mask) as (1, B·T, C), after attention saving nothing but x and its output:
    memory.recompute=mlp.
    """
    out = block.attention(*block.before(x, *angles), mask)
    flat = x.reshape(1, -1, x.shape[-1]), out.reshape(1, -1, *out.shape[2:])
    return _After.apply(*flat, block, tile, *_trained(block))


def forward_in_tiles(block: Any, x: Tensor, angles: Angles, mask: Mask, tile: int) -> Tensor:
    """block(x, angles, mask) without gradients; outside attention, `tile` tokens at a time."""
    rows, flat = x.shape[:2], x.reshape(1, -1, x.shape[-1])
    inputs = flat, *_flat(angles)
    qkv = (t.view(*rows, *t.shape[2:]) for t in in_tiles(block.before, tile, inputs))
    out = block.attention(*qkv, mask)
    return in_tiles(block.after, tile, (flat, out.reshape(1, -1, *out.shape[2:])))[0].view(x.shape)


def _flat(angles: Angles) -> Angles:
    """Return the angles of all tokens as one sequence, (1, B·T, 1, D/2)."""
    return tuple(x.flatten(0, 1)[None] for x in angles)


@dataclass
class _Tape:
    """What the blocks of one forward pass share, and the activations saved for its backward."""

    blocks: Sequence[Any]
    shape: torch.Size  # B, T, C
    angles: Sequence[Angles]  # of each block, (1, B·T, 1, D/2)
    masks: Sequence[Mask]
    memory: MemoryConfig
    tile: int  # tokens; 0: all
    surroundings: _Surroundings
    saved: dict[int, SavedTensors] = field(default_factory=dict)

    def before(self, i: int, x: Tensor) -> Tokens:
        return in_tiles(self.blocks[i].before, self.tile, (x, *self.angles[i]))

    def after(self, i: int, x: Tensor, out: Tensor) -> Tensor:
        return in_tiles(self.blocks[i].after, self.tile, (x, out))[0]

    def run(self, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return block i of x, attention's output, and its lse if backward takes it."""
        attend, scores = self.blocks[i].attention.attend, self.blocks[i].attention.scores
        with self.surroundings.restored():
            q, k, v = (self.rows(t) for t in self.before(i, x))
            if attend.description.has_backward:
                out, lse = attend.with_lse(q, k, v, self.masks[i], scores)
            else:
                out, lse = attend(q, k, v, self.masks[i], scores), None
            del q, k, v
            out = out.reshape(1, -1, *out.shape[2:])
            return self.after(i, x, out), out, lse

    def rows(self, x: Tensor) -> Tensor:
        """(1, B·T, H, D) → (B, T, H, D)"""
        return x.view(*self.shape[:2], *x.shape[2:])

    def save(self, i: int, x: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Save attention's output of block i and, of every keep_every-th block, its input x."""
        tensors = {"out": out} if lse is None else {"out": out, "lse": lse}
        if i % (self.memory.keep_every or 1) == 0:
            tensors["x"] = x
        offloaded = i < round((self.memory.offload or 0.0) * len(self.blocks))
        self.saved[i] = SavedTensors(tensors, HostBuffers.of(x.device, i) if offloaded else None)

    def input(self, i: int) -> Tensor:
        """x of block i: saved, or recomputed from what the block before it saved."""
        saved = self.saved[i].tensors()
        if "x" in saved:
            return saved["x"]
        # FSDP has resharded it; its own backward comes next, and shards it again
        self.blocks[i - 1].unshard()
        return self.after(i - 1, self.input(i - 1), self.saved[i - 1].tensors()["out"])


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: _Tape, i: int, *weights: Tensor) -> Tensor:
        ctx.tape, ctx.i, ctx.weights = tape, i, weights
        y, out, lse = tape.run(i, x)
        tape.save(i, x, out, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tape, i = ctx.tape, ctx.i
        assert i in tape.saved, "the gradients of this forward pass were already taken"
        if i:
            tape.saved[i - 1].prefetch()
        sums = _Sums(tape.blocks[i], ctx.weights)
        with tape.surroundings.restored():
            dx = _block_backward(tape, i, dy.contiguous(), sums)
        del tape.saved[i]
        return dx, None, None, *sums.gradients()


def _block_backward(tape: _Tape, i: int, dy: Tensor, sums: _Sums) -> Tensor:
    """dx of block i; its weights' gradients go into `sums`.

    In tiles dx takes the memory of dy, which the block above made and nobody else reads.
    """
    x, block = tape.input(i), tape.blocks[i]
    saved = tape.saved[i].tensors()
    out, lse = saved["out"], saved.get("lse")
    one_tile = _one_tile(tape.tile, x)

    # after: dx along the residual stream, and do of attention's output
    after = partial(block.after, needs_value=False)
    into = None if one_tile else [dy, torch.empty_like(out)]
    dx, do = gradients_in_tiles(after, tape.tile, (x, out), (), (dy,), sums, into)

    # q, k and v again; in one tile with their graph, which serves the last step
    leaf = x.detach().requires_grad_(one_tile)
    with torch.set_grad_enabled(one_tile):
        qkv = block.before(leaf, *tape.angles[i]) if one_tile else tape.before(i, x)
    q, k, v = (tape.rows(t.detach()) for t in qkv)

    # attention
    scores = block.attention.scores
    gradients = block.attention.attend.backward(
        tape.rows(do), (q, k, v, tape.rows(out), lse), tape.masks[i], scores
    )
    dqkv: Tokens = tuple(t.reshape(1, -1, *t.shape[2:]) for t in gradients[:3])
    sums.add([gradients[3] if weight is scores.sinks else None for weight in sums.weights])
    del do, q, k, v, out, lse, saved, into

    # before
    if one_tile:
        leaves = leaf, *sums.weights
        dx_before, *dweights = torch.autograd.grad(qkv, leaves, dqkv, allow_unused=True)
        sums.add(dweights)
        return dx + dx_before
    del qkv
    gradients_in_tiles(block.before, tape.tile, (x,), tape.angles[i], dqkv, sums, [dx], add=True)
    return dx


class _After(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Tensor, block: Any, tile: int, *weights: Tensor
    ) -> Tensor:
        ctx.block, ctx.tile, ctx.weights = block, tile, weights
        ctx.surroundings = _Surroundings(x.device.type)
        ctx.save_for_backward(x, out)
        with ctx.surroundings.restored():
            return in_tiles(block.after, tile, (x, out))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        sums, (x, out) = _Sums(ctx.block, ctx.weights), ctx.saved_tensors
        after = partial(ctx.block.after, needs_value=False)
        into = None if _one_tile(ctx.tile, x) else [torch.empty_like(x), torch.empty_like(out)]
        with ctx.surroundings.restored():
            dx, do = gradients_in_tiles(after, ctx.tile, (x, out), (), (dy,), sums, into)
        return dx, do, None, None, *sums.gradients()


def in_tiles(function: Callable[..., Any], tile: int, inputs: Tokens) -> Tokens:
    """function(*inputs) without gradients, `tile` tokens (0: all) at a time."""
    with torch.no_grad():
        if _one_tile(tile, inputs[0]):
            return _tuple(function(*inputs))
        outputs: Tokens = ()
        tokens = inputs[0].shape[1]
        for at in _tiles(tile, tokens):
            parts = _tuple(function(*(x[:, at] for x in inputs)))
            outputs = outputs or tuple(p.new_empty(1, tokens, *p.shape[2:]) for p in parts)
            for output, part in zip(outputs, parts, strict=True):
                output[:, at] = part
            del parts, part  # the next tile takes their memory
    return outputs


def gradients_in_tiles(
    function: Callable[..., Any],
    tile: int,
    inputs: Tokens,
    constants: Tokens,
    gradients: Tokens,
    sums: _Sums,
    into: list[Tensor] | None,
    add: bool = False,
) -> Sequence[Tensor]:
    """Return gradients of `inputs`, given the `gradients` of function(*inputs, *constants).

    They are written, or with `add` added, to the tensors `into`, of which one may be among
    `gradients`. The gradients of the weights go into `sums`.
    """
    for at in _tiles(tile, inputs[0].shape[1]):
        with torch.enable_grad():
            leaves = [x[:, at].detach().requires_grad_() for x in inputs]
            outputs = _tuple(function(*leaves, *(x[:, at] for x in constants)))
        douts = [g[:, at] for g in gradients]
        every = torch.autograd.grad(outputs, (*leaves, *sums.weights), douts, allow_unused=True)
        sums.add(every[len(leaves) :])
        if into is None:  # one tile
            return every[: len(leaves)]
        for target, part in zip(into, every, strict=False):
            target[:, at] = target[:, at] + part if add else part
        # The next tile takes their memory: 464 MiB of 1b with tiles of 32,768 tokens
        del leaves, outputs, douts, every, part
    return into or ()


class _Sums:
    """Gradients of `weights`, added up over tiles.

    Raises RuntimeError unless they still are the block's, which runs again.
    """

    def __init__(self, block: Any, weights: Sequence[Tensor]) -> None:
        own = {id(weight) for weight in block.parameters()}
        if any(id(weight) not in own for weight in weights):
            raise RuntimeError(
                "the weights of this forward pass have left the model before backward; with "
                "torch.func.functional_call use memory=fast"
            )
        self.weights = weights
        self.sums: list[Tensor | None] = [None] * len(weights)

    def add(self, parts: Sequence[Tensor | None]) -> None:
        for n, (total, part) in enumerate(zip(self.sums, parts, strict=True)):
            if part is not None and total is None:
                self.sums[n] = part.to(torch.promote_types(part.dtype, torch.float32))
            elif part is not None and total is not None:
                total += part

    def gradients(self) -> list[Tensor | None]:
        """The sums, in the precision of the weights."""
        return [
            None if g is None else g.to(w.dtype)
            for g, w in zip(self.sums, self.weights, strict=True)
        ]


class _Surroundings:
    """Autocast and the balance of experts as they were in the forward pass, for a backward that
    runs parts of it again.
    """

    def __init__(self, device: str) -> None:
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        # no cache: a weight cast while gradients were off would be taken for one whose gradient is
        # wanted
        self.autocast = partial(torch.autocast, device, dtype, enabled, cache_enabled=False)
        self.balance = running()

    @contextmanager
    def restored(self) -> Iterator[None]:
        with self.autocast(), balancing(self.balance):
            yield


def _tiles(tile: int, tokens: int) -> Iterator[slice]:
    """Slices of at most `tile` tokens (0: all), of one size but for the last: compiled code depends
    on the size.
    """
    size = tile_size(tokens, tile or tokens)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _one_tile(tile: int, x: Tensor) -> bool:
    return tile == 0 or x.shape[1] <= tile


def _trained(block: Any) -> list[Tensor]:
    return [p for p in block.parameters() if p.requires_grad]


def _tuple(outputs: Any) -> Tokens:
    return outputs if isinstance(outputs, tuple) else (outputs,)
