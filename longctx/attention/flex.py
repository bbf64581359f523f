"""flex: torch's FlexAttention, compiled by inductor on a GPU.

The intervals of a mask become its mask function and its block mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from longctx.attention.description import DESCRIPTIONS
from longctx.attention.mask import Mask
from longctx.attention.registry import AttentionRequest, Backend, Output, register
from longctx.kernels.attention import Scores
from longctx.kernels.attention.key_bias import reference

BLOCK = 128


class Flex(Backend):
    """Any interval mask, on a GPU; its lse is differentiable."""

    description = DESCRIPTIONS["flex"]

    def refusal(self, request: AttentionRequest) -> str | None:
        if request.device.type != "cuda":
            return "FlexAttention has no backward on a CPU; use attention=flash"
        if request.head_dim < 16 or request.head_dim > 256:
            return f"head size {request.head_dim} is outside 16 to 256; use attention=naive"
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> Output:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        options: dict[str, Any] = {"scale": scores.scale, "enable_gqa": True}
        options["return_aux"] = AuxRequest(lse=True)
        if scores.key_bias is not None:
            ref = reference(scores.key_bias, mask.last)
            options["score_mod"] = _biased(scores.softcap, scores.key_bias, ref)
        elif scores.softcap is not None:
            options["score_mod"] = _capped(scores.softcap)
        # otherwise short sequences go to a kernel for decoding that lacks shapes
        options["kernel_options"] = {"BACKEND": "TRITON"}
        if torch.compiler.is_compiling():
            out, aux = _attend()(*heads, block_mask=block_mask(mask, k.shape[1]), **options)
        else:
            if "flex" not in mask.cache:
                mask.cache["flex"] = block_mask(mask, k.shape[1])
            blocks = mask.cache["flex"]
            # compile even if the caller forbids it: otherwise FlexAttention has the (Tq, Tk) scores
            # in memory
            with (
                torch.compiler.set_stance("default"),
                torch._dynamo.config.patch(recompile_limit=64),
            ):
                out, aux = _attend()(*heads, block_mask=blocks, **options)
        return out.transpose(1, 2), aux.lse, "torch flex, compiled"


@functools.cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """Return FlexAttention's score function; one object for each softcap, so it compiles once."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(s / softcap)

    return score


def _biased(softcap: float | None, key_bias: Tensor, ref: Tensor) -> Callable[..., Tensor]:
    """Return FlexAttention's score function with a bias of each key; it captures tensors."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        capped = s if softcap is None else softcap * torch.tanh(s / softcap)
        return capped + (key_bias[b, h, j] - ref[b, h, i])

    return score


@functools.cache
def _attend() -> Any:
    # fullgraph: at the recompile limit an error, never the scores in memory
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(mask: Mask, Tk: int) -> BlockMask:
    """Return FlexAttention's block mask of the intervals: (T / BLOCK)² booleans, never T²."""
    first, last = mask.first, mask.last
    assert first is not None and last is not None
    # a block is touched if its last query reaches its first key, and the reverse
    starts = torch.arange(0, first.shape[1], BLOCK, device=first.device)
    ends = (starts + BLOCK).clamp(max=first.shape[1]) - 1
    keys = torch.arange(0, Tk, BLOCK, device=first.device)
    key_ends = (keys + BLOCK).clamp(max=Tk) - 1
    touched = (keys <= last[:, ends, None]) & (key_ends >= first[:, starts, None])
    full = (
        (keys >= first[:, ends, None])
        & (keys + BLOCK - 1 <= last[:, starts, None])
        & (starts + BLOCK <= first.shape[1])[:, None]
    )
    partial = touched & ~full

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b if first.shape[0] > 1 else 0
        return (j >= first[row, i]) & (j <= last[row, i])

    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(first.shape[1], Tk),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return count (B, 1, rows) and indices (B, 1, rows, columns) of each row's true blocks.

    Both are int32; the true blocks come first.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


register("flex", Flex())
