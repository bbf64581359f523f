"""Torch's fused CPU kernel under masks: document by document; for windows and Tq ≠ Tk by tiles of
queries.

Imported where it is first called: `torch.compiler.disable` imports torch's compiler, which takes
as long as torch itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.attention.tiled import fused_documents

TILE = 512  # queries of a tile


@torch.compiler.disable
def attend(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out and lse of q (B, Tq, Hq, D) and k, v (B, Tk, Hkv, D); query i of row b sees the keys from
    first[b, i] to last[b, i], both (B or 1, Tq).
    """
    outs, lses = [], []
    for b in range(q.shape[0]):
        qb, kb, vb = (x[b : b + 1] for x in (q, k, v))
        firsts, lasts = first[b % first.shape[0]], last[b % last.shape[0]]
        documents = fused_documents(firsts, lasts, k.shape[1])
        parts = []
        if documents is None:
            for i in range(0, len(firsts), TILE):
                parts.append(_tile(qb, kb, vb, firsts, lasts, i, scale))
        else:
            for start, end, causal in documents:
                keys = slice(start, end) if causal else slice(None)
                parts.append(
                    _fused(qb[:, start:end], kb[:, keys], vb[:, keys], causal, None, scale)
                )
        outs.append(torch.cat([out for out, _ in parts], 1))
        lses.append(torch.cat([lse for _, lse in parts], 2))
    return torch.cat(outs), torch.cat(lses)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Torch's fused CPU kernel on (1, T, H, D), heads of k and v repeated for their group."""
    G = q.shape[2] // k.shape[2]
    heads = (x.transpose(1, 2) for x in (q, k.repeat_interleave(G, 2), v.repeat_interleave(G, 2)))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *heads, is_causal=causal, attn_mask=bias, scale=scale
    )
    return out.transpose(1, 2), lse.detach().float()


def _tile(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, i: int, scale: float
) -> tuple[Tensor, Tensor]:
    """TILE queries against the keys that any of them sees, masked by a (TILE, keys) bias."""
    rows = slice(i, i + TILE)
    lo = min(int(first[rows][0]), k.shape[1] - 1)
    hi = max(int(last[rows][-1]), lo) + 1
    key = torch.arange(lo, hi)
    visible = (key >= first[rows, None]) & (key <= last[rows, None])
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, float("-inf"))
    sees = visible.any(-1)
    queries = torch.where(sees[:, None, None], q[:, rows], 0)  # 0 · NaN would reach dk and dv
    out, lse = _fused(queries, k[:, lo:hi], v[:, lo:hi], False, bias, scale)
    return torch.where(sees[:, None, None], out, 0), lse.masked_fill(~sees, float("-inf"))
