"""flex: torch's FlexAttention, compiled by inductor on a GPU.

The intervals of a mask become its mask function and its block mask.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from longctx.attention.description import DESCRIPTIONS
from longctx.attention.mask import INT32_MAX, Mask
from longctx.attention.registry import AttentionRequest, Backend, Mod, Output, mods, register
from longctx.kernels.attention import Scores
from longctx.kernels.attention.key_bias import reference

BLOCK = 128


class Flex(Backend):
    """Any interval mask, on a GPU; its lse is differentiable."""

    description = DESCRIPTIONS["flex"]

    def refusal(self, request: AttentionRequest) -> str | None:
        if request.device.type != "cuda":
            other = "naive" if request.options else "flash"
            return f"FlexAttention has no backward on a CPU; use attention={other}"
        if request.head_dim < 16 or request.head_dim > 256:
            return f"head size {request.head_dim} is outside 16 to 256; use attention=naive"
        return None

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, score: Any = "none"
    ) -> Output:
        if max(q.numel(), k.numel()) > INT32_MAX:
            raise ValueError("attention=flex is wrong for 2^31 elements of q; give shorter rows")
        # Offsets have 32 bits: views into a projection of q, k and v may reach further
        spans = (max(x.shape[0] * x.stride(0), x.shape[1] * x.stride(1)) for x in (q, k, v))
        views = max(spans) > INT32_MAX
        heads = ((x.contiguous() if views else x).transpose(1, 2) for x in (q, k, v))
        options: dict[str, Any] = {"scale": scores.scale, "enable_gqa": True}
        options["return_aux"] = torch_flex.AuxRequest(lse=True)
        score_mod, mask_mod = mods(score, mask, q.shape[0])
        options["score_mod"] = _score_mod(scores, mask, score_mod)
        asked, attend = (mask, k.shape[1], q.shape[2], mask_mod), compiled(flex_attention)
        # otherwise short sequences go to a kernel for decoding that lacks shapes
        options["kernel_options"] = {"BACKEND": "TRITON"}
        if torch.compiler.is_compiling():
            out, aux = attend(*heads, block_mask=block_mask(*asked), **options)
        else:
            # compile even if the caller forbids it, or the (Tq, Tk) scores are in memory
            limit = torch._dynamo.config.patch(recompile_limit=64)
            with torch.compiler.set_stance("default"), limit:
                hides = score if isinstance(score, str) else score[1]
                if hides not in mask.cache:
                    mask.cache[hides] = block_mask(*asked)
                out, aux = attend(*heads, block_mask=mask.cache[hides], **options)
        return out.transpose(1, 2), aux.lse, "torch flex, compiled"


def _score_mod(scores: Scores, mask: Mask, score_mod: Mod | None) -> Mod | None:
    """Return FlexAttention's function of all that changes a score; None if nothing does."""
    softcap, bias = scores.softcap, scores.key_bias
    if softcap is None and bias is None:
        return score_mod
    ref: Any = None if bias is None else reference(bias, mask.last)

    def changed(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        s = s if score_mod is None else score_mod(s, b, h, i, j)
        return s if bias is None else s + (bias[b, h, j] - ref[b, h, i])

    return changed


@functools.cache
def compiled(function: Any) -> Any:
    # fullgraph: at the recompile limit an error, never the scores in memory
    return torch.compile(function, fullgraph=True)


def block_mask(mask: Mask, Tk: int, heads: int = 1, mask_mod: Mod | None = None) -> BlockMask:
    """Return the block mask of the intervals and `mask_mod`; no (T, T) mask is ever in memory."""
    first, last = mask.first, mask.last
    assert first is not None and last is not None

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b if first.shape[0] > 1 else 0
        return (j >= first[row, i]) & (j <= last[row, i])

    if mask_mod is not None:
        asked = torch_flex.and_masks(sees, mask_mod), first.shape[0], heads, first.shape[1], Tk
        return compiled(torch_flex.create_block_mask)(*asked, first.device, BLOCK)
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
