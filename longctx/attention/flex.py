"""flex: torch's FlexAttention, the intervals given as its mask function and block mask, compiled by
inductor on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from longctx.attention.mask import Mask
from longctx.attention.registry import Request, register

BLOCK = 128


class Flex:
    """Any interval mask, on a GPU; its lse is differentiable."""

    options: dict[str, tuple[Any, ...]] = {}

    def refusal(self, request: Request) -> str | None:
        if request.device.type != "cuda":
            return f"FlexAttention has no backward on {request.device.type}; use attention=flash"
        if request.head_dim < 16 or request.head_dim > 256:
            return f"head size {request.head_dim} is outside 16 to 256; use attention=naive"
        return None

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, str]:
        from torch.nn.attention.flex_attention import AuxRequest

        heads = (x.transpose(1, 2) for x in (q, k, v))
        options = {"scale": scale, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        options["kernel_options"] = {
            "BACKEND": "TRITON"
        }  # else short rows go to a kernel for decoding, which lacks shapes
        if torch.compiler.is_compiling():
            out, aux = _attend()(*heads, block_mask=block_mask(mask, k.shape[1]), **options)
        else:
            blocks = mask.cache.get("flex") or mask.cache.setdefault(
                "flex", block_mask(mask, k.shape[1])
            )
            # Also where the caller forbids compiling: FlexAttention not compiled has the (Tq, Tk)
            # scores in memory.
            with (
                torch.compiler.set_stance("default"),
                torch._dynamo.config.patch(recompile_limit=64),
            ):
                out, aux = _attend()(*heads, block_mask=blocks, **options)
        return out.transpose(1, 2), aux.lse, "torch flex, compiled"


@functools.cache
def _attend() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(
        flex_attention, fullgraph=True
    )  # at the recompile limit an error, never the scores in memory


def block_mask(mask: Mask, Tk: int) -> Any:
    """FlexAttention's block mask, straight from the intervals: O(T / BLOCK)² booleans, never O(T²)."""
    from torch.nn.attention.flex_attention import BlockMask

    first, last = mask.first, mask.last
    assert first is not None and last is not None
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
    """Per row of blocks: how many are chosen, and all indices with the chosen ones first, (B, 1,
    rows[, columns]) int32.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


register("flex", Flex())
