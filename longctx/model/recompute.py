"""Blocks that compute again in backward what they did not keep, never attention, and in tiles of
tokens.

A block is token by token but for attention: (q, k, v) = before(x), out = attention(q, k, v), y =
after(x, out). Keeping x, out and attention's lse is enough for its gradients: `after` and `before`
run again, tile by tile, and attention's backward takes out and lse as they are. A backend without
such a backward (all but flash) runs its forward again.

With `keep_every` = n only the x of every n-th block is kept: another is after(x, out) of the block
before it, which needs no attention either. Gradients of weights are added up over the tiles in the
weights' precision, fp32 at least. Compare activation checkpointing (arXiv 1604.06174) and tiled
computation in ALST (arXiv 2506.13996).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.attention import Mask
from longctx.config.memory_config import MemoryConfig
from longctx.model.offload import Host, Kept

Tokens = tuple[Tensor, ...]  # each (1, B·T, ...): the tokens of all rows, one after another


def through(
    blocks: Sequence[Any],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    masks: Sequence[Mask],
    memory: MemoryConfig,
) -> Tensor:
    """x (B, T, C) through `blocks` (see `longctx.model.layers.Block`), each with its mask, by
    memory.recompute=block.
    """
    tape = _Tape(blocks, x.shape, cos.flatten(0, 1)[None], sin.flatten(0, 1)[None], masks, memory)
    y = x.reshape(1, -1, x.shape[-1])
    for i, block in enumerate(blocks):
        y = _Block.apply(y, tape, i, *_trained(block))
    return y.view(x.shape)


def after(block: Any, x: Tensor, out: Tensor, tile: int) -> Tensor:
    """block.after(x, out), of which nothing but x and out is kept: memory.recompute=mlp."""
    flat = x.reshape(1, -1, x.shape[-1]), out.reshape(1, -1, *out.shape[2:])
    y: Tensor = _After.apply(*flat, block, tile, *_trained(block))
    return y.view(x.shape)


def without_gradient(
    block: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, tile: int
) -> Tensor:
    """block(x, cos, sin, mask) where no gradient is wanted: outside attention `tile` tokens at one
    time.
    """
    rows, flat = x.shape[:2], x.reshape(1, -1, x.shape[-1])
    angles = (t.flatten(0, 1)[None] for t in (cos, sin))
    qkv = (t.view(*rows, *t.shape[2:]) for t in in_tiles(block.before, tile, (flat, *angles)))
    out = block.attention(*qkv, mask)
    return in_tiles(block.after, tile, (flat, out.reshape(1, -1, *out.shape[2:])))[0].view(x.shape)


@dataclass
class _Tape:
    """What the blocks of one forward pass share, and keep until its backward."""

    blocks: Sequence[Any]
    shape: torch.Size  # B, T, C
    cos: Tensor  # (1, B·T, 1, D/2), as sin
    sin: Tensor
    masks: Sequence[Mask]
    memory: MemoryConfig
    kept: dict[int, Kept] = field(default_factory=dict)
    precision: _Precision = field(init=False)

    def __post_init__(self) -> None:
        self.tile = self.memory.mlp_tile or 0
        self.precision = _Precision(self.cos.device.type)

    def before(self, i: int, x: Tensor) -> Tokens:
        return in_tiles(self.blocks[i].before, self.tile, (x, self.cos, self.sin))

    def after(self, i: int, x: Tensor, out: Tensor) -> Tensor:
        return in_tiles(self.blocks[i].after, self.tile, (x, out))[0]

    def run(self, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Block i of x: its output, what its attention gave, and its lse where the backend's
        backward takes it.
        """
        attend = self.blocks[i].attention.attend
        with self.precision.restored():
            q, k, v = (self.rows(t) for t in self.before(i, x))
            if attend.saves_output:
                out, lse = attend(q, k, v, self.masks[i], return_lse=True)
            else:
                out, lse = attend(q, k, v, self.masks[i]), None
            del q, k, v
            out = out.reshape(1, -1, *out.shape[2:])
            return self.after(i, x, out), out, lse

    def rows(self, x: Tensor) -> Tensor:
        """(1, B·T, H, D) → (B, T, H, D)"""
        return x.view(*self.shape[:2], *x.shape[2:])

    def keep(self, i: int, x: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Keep block i's input, if it is the turn of it, and its attention's output, here or on the
        host.
        """
        tensors = {"out": out} if lse is None else {"out": out, "lse": lse}
        if i % (self.memory.keep_every or 1) == 0:
            tensors["x"] = x
        away = i < round((self.memory.offload or 0.0) * len(self.blocks))
        self.kept[i] = Kept(tensors, Host.of(x.device, i) if away else None)

    def input(self, i: int) -> Tensor:
        """x of block i: kept, or computed from what the block before it kept."""
        kept = self.kept[i].tensors()
        return (
            kept["x"]
            if "x" in kept
            else self.after(i - 1, self.input(i - 1), self.kept[i - 1].tensors()["out"])
        )


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: _Tape, i: int, *weights: Tensor) -> Tensor:
        ctx.tape, ctx.i, ctx.weights = tape, i, weights
        y, out, lse = tape.run(i, x)
        tape.keep(i, x, out, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tape, i = ctx.tape, ctx.i
        if i not in tape.kept:
            raise RuntimeError(
                "the gradients of this forward pass were already taken; run it again"
            )
        if i:
            tape.kept[i - 1].prefetch()
        sums = _Sums(ctx.weights)
        with tape.precision.restored():
            dx = _through_attention(tape, i, dy.contiguous(), sums)
        del tape.kept[i]
        return dx, None, None, *sums.gradients()


def _through_attention(tape: _Tape, i: int, dy: Tensor, sums: _Sums) -> Tensor:
    """dx of block i, its weights' gradients into `sums`. In tiles dx takes dy's place: the next
    block made it for us.
    """
    x, block = tape.input(i), tape.blocks[i]
    kept = tape.kept[i].tensors()
    out, lse = kept["out"], kept.get("lse")
    whole = _one_tile(tape.tile, x)
    into = None if whole else [dy, torch.empty_like(out)]
    dx, do = gradients_in_tiles(
        partial(block.after, valued=False), tape.tile, (x, out), (), (dy,), sums, into
    )

    leaf = x.detach().requires_grad_(whole)
    with torch.set_grad_enabled(
        whole
    ):  # all at once q, k and v are computed once, and their graph serves below
        qkv = block.before(leaf, tape.cos, tape.sin) if whole else tape.before(i, x)
    q, k, v = (tape.rows(t.detach()) for t in qkv)
    dqkv: Tokens = block.attention.attend.backward(
        tape.rows(do), q, k, v, tape.rows(out), lse, tape.masks[i]
    )
    dqkv = tuple(t.reshape(1, -1, *t.shape[2:]) for t in dqkv)
    del do, q, k, v, out, lse, kept, into
    if whole:
        found = torch.autograd.grad(qkv, (leaf, *sums.weights), dqkv, allow_unused=True)
        sums.add(found[1:])
        return dx + found[0]
    del qkv
    gradients_in_tiles(
        block.before, tape.tile, (x,), (tape.cos, tape.sin), dqkv, sums, [dx], add=True
    )
    return dx


class _After(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Tensor, block: Any, tile: int, *weights: Tensor
    ) -> Tensor:
        ctx.block, ctx.tile, ctx.weights, ctx.precision = (
            block,
            tile,
            weights,
            _Precision(x.device.type),
        )
        ctx.save_for_backward(x, out)
        with ctx.precision.restored():
            return in_tiles(block.after, tile, (x, out))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        sums, (x, out) = _Sums(ctx.weights), ctx.saved_tensors
        into = None if _one_tile(ctx.tile, x) else [torch.empty_like(x), torch.empty_like(out)]
        with ctx.precision.restored():
            dx, do = gradients_in_tiles(
                partial(ctx.block.after, valued=False), ctx.tile, (x, out), (), (dy,), sums, into
            )
        return dx, do, None, None, *sums.gradients()


def in_tiles(function: Callable[..., Any], tile: int, inputs: Tokens) -> Tokens:
    """The tensors that `function` makes of `inputs`, token by token: `tile` tokens (0: all) at one
    time, no gradient.
    """
    with torch.no_grad():
        if _one_tile(tile, inputs[0]):
            return _tuple(function(*inputs))
        whole: Tokens = ()
        for at in _tiles(tile, inputs[0].shape[1]):
            parts = _tuple(function(*(x[:, at] for x in inputs)))
            whole = whole or tuple(
                part.new_empty(1, inputs[0].shape[1], *part.shape[2:]) for part in parts
            )
            for all_of_it, part in zip(whole, parts, strict=True):
                all_of_it[:, at] = part
    return whole


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
    """Gradients of `inputs` where those of function(*inputs, *constants) are `gradients`; of the
    weights into `sums`.

    They are written, or with `add` added, to the tensors `into`, of which one may be among
    `gradients`.
    """
    found: Sequence[Tensor] = ()
    for at in _tiles(tile, inputs[0].shape[1]):
        with torch.enable_grad():
            leaves = [x[:, at].detach().requires_grad_() for x in inputs]
            outputs = _tuple(function(*leaves, *(x[:, at] for x in constants)))
        douts = [g[:, at] for g in gradients]
        every = torch.autograd.grad(outputs, (*leaves, *sums.weights), douts, allow_unused=True)
        found = every[: len(leaves)]
        sums.add(every[len(leaves) :])
        for whole, part in zip(into or (), found, strict=bool(into)):
            whole[:, at] = whole[:, at] + part if add else part
    return found if into is None else into


class _Sums:
    """Gradients of `weights`, added up over tiles."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
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


class _Precision:
    """Autocast as it was when the forward pass ran, for a backward that runs it again."""

    def __init__(self, device: str) -> None:
        self.device, self.enabled = device, torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device)

    def restored(self) -> torch.autocast:
        # no cache: a weight cast while gradients were off would be taken for one whose gradient is
        # wanted
        return torch.autocast(self.device, self.dtype, self.enabled, cache_enabled=False)


def _tiles(tile: int, tokens: int) -> Iterator[slice]:
    """At most `tile` tokens each (0: all), of one size but for the last, so that compiled code
    serves them.
    """
    size = tokens
    if tile:
        pieces = -(-tokens // tile)
        size = min(tile, -(-tokens // pieces // 128) * 128)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _one_tile(tile: int, x: Tensor) -> bool:
    return tile == 0 or x.shape[1] <= tile


def _trained(block: Any) -> list[Tensor]:
    return [p for p in block.parameters() if p.requires_grad]


def _tuple(outputs: Any) -> Tokens:
    return outputs if isinstance(outputs, tuple) else (outputs,)
