"""FlashAttention's algorithm in plain torch, for CPUs; never a (Tq, Tk) matrix.

Where a row is made of causal documents, or sees everything, each document goes to torch's own fused
CPU kernel; any other interval mask (windows, Tq ≠ Tk, shards) is computed tile by tile here.
Equations and letters are those of portable.py. Shapes: q, o, do (B, Tq, Hq, D); k, v
(B, Tk, Hkv, D); lse, delta (B, Hq, Tq); intervals (B or 1, T).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

# queries × keys of a tile: small enough for L2, large enough for the matrix library
ROWS = 256
COLS = 1024


def forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out like q and lse (B, Hq, Tq) float32.

    The last dimension of q, k and v must be contiguous: torch's kernel assumes it.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    for b in range(q.shape[0]):
        f, la = first[b % first.shape[0]], last[b % last.shape[0]]
        documents = fused_documents(f, la, k.shape[1])
        if documents is None:
            _forward_tiles(q[b], k[b], v[b], f, la, scale, out[b], lse[b])
            continue
        for start, end, causal in documents:
            rows, cols = slice(start, end), slice(start, end) if causal else slice(0, k.shape[1])
            o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads(q[b, rows]),
                *_grouped(q.shape[2], k[b, cols], v[b, cols]),
                is_causal=causal,
                scale=scale,
            )
            out[b, rows], lse[b, :, rows] = o[0].transpose(0, 1), s[0]
    return out, lse


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    first: Tensor,
    last: Tensor,
    qfirst: Tensor,
    qlast: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for the gradients do of out and dlse of lse."""
    do = do.contiguous()
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for b in range(q.shape[0]):
        f, la = first[b % first.shape[0]], last[b % last.shape[0]]
        documents = fused_documents(f, la, k.shape[1]) if dlse is None else None
        if documents is None:
            delta = (do[b].float() * o[b].float()).sum(-1).T
            delta = delta if dlse is None else delta - dlse[b]
            _backward_tiles(
                do[b], q[b], k[b], v[b], delta, lse[b], f, la, scale, dq[b], dk[b], dv[b]
            )
            continue
        for start, end, causal in documents:
            rows, cols = slice(start, end), slice(start, end) if causal else slice(0, k.shape[1])
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads(do[b, rows]),
                _heads(q[b, rows]),
                *_grouped(q.shape[2], k[b, cols], v[b, cols]),
                _heads(o[b, rows]),
                lse[b : b + 1, :, rows].contiguous(),
                0.0,
                causal,
                scale=scale,
            )
            dq[b, rows] = grads[0][0].transpose(0, 1)
            for target, grad in ((dk, grads[1]), (dv, grads[2])):
                of_group = grad[0].unflatten(0, (k.shape[2], -1)).float()
                target[b, cols] += of_group.sum(1).transpose(0, 1).to(k.dtype)
    return dq, dk, dv


def fused_documents(first: Tensor, last: Tensor, Tk: int) -> list[tuple[int, int, bool]] | None:
    """One row's intervals as (start, end, causal) documents for torch's fused kernel, or None."""
    Tq = first.shape[0]
    if bool((first == 0).all()) and bool((last == Tk - 1).all()):
        return [(0, Tq, False)]
    starts = torch.nonzero(torch.cat([first.new_ones(1), first.diff()])).flatten()
    causal = Tq == Tk and torch.equal(last, torch.arange(Tq, dtype=last.dtype))
    if not causal or not torch.equal(first[starts].long(), starts):
        return None
    bounds = [*starts.tolist(), Tq]
    return [(s, e, True) for s, e in itertools.pairwise(bounds)]


def _heads(x: Tensor) -> Tensor:
    """(T, H, D) → (1, H, T, D)."""
    return x.transpose(0, 1)[None]


def _grouped(Hq: int, *tensors: Tensor) -> list[Tensor]:
    """Keys or values (T, Hkv, D) → (1, Hq, T, D), each head repeated for its group of queries."""
    return [_heads(x.repeat_interleave(Hq // x.shape[1], dim=1)) for x in tensors]


def _tiles(first: Tensor, last: Tensor) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(rows, keys, visible or None where all are) of every tile that some query sees."""
    for i in range(0, first.shape[0], ROWS):
        f, la = first[i : i + ROWS], last[i : i + ROWS]
        for j in range(int(f[0]), int(la[-1]) + 1, COLS):
            end = min(j + COLS, int(la[-1]) + 1)
            keys = torch.arange(j, end)
            all_seen = int(f[-1]) <= j and end - 1 <= int(la[0])
            visible = None if all_seen else (keys >= f[:, None]) & (keys <= la[:, None])
            yield slice(i, i + len(f)), slice(j, end), visible


def _scores(q: Tensor, k: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """(Hkv, G, rows, keys) float32, -inf where not seen; q (rows, Hkv, G, D), k (keys, Hkv, D)."""
    s = torch.einsum("ihgd,jhd->hgij", q.float(), k.float()) * scale
    return s if visible is None else s.masked_fill(~visible, float("-inf"))


def _forward_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    G = q.shape[1] // k.shape[1]
    qg, og = q.unflatten(1, (-1, G)), out.unflatten(1, (-1, G))
    m = torch.full((k.shape[1], G, q.shape[0]), float("-inf"))
    l = torch.zeros_like(m)
    acc = torch.zeros(k.shape[1], G, *q.shape[::2])
    for i, j, visible in _tiles(first, last):
        s = _scores(qg[i], k[j], visible, scale)
        m_new = torch.maximum(m[..., i], s.amax(-1))
        shift = m_new.masked_fill(m_new == float("-inf"), 0.0)
        p, alpha = (s - shift[..., None]).exp(), (m[..., i] - shift).exp()
        l[..., i] = l[..., i] * alpha + p.sum(-1)
        acc[..., i, :] = acc[..., i, :] * alpha[..., None] + torch.einsum(
            "hgij,jhd->hgid", p, v[j].float()
        )
        m[..., i] = m_new
    og.copy_((acc / l.masked_fill(l == 0, 1.0)[..., None]).permute(2, 0, 1, 3))
    lse.copy_((m + l.log()).flatten(0, 1))


def _backward_tiles(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    G = q.shape[1] // k.shape[1]
    qg, dog = (x.unflatten(1, (-1, G)) for x in (q, do))
    lse, delta = (x.unflatten(0, (-1, G)) for x in (lse, delta))
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    dq_sum, dk_sum, dv_sum = (torch.zeros(x.shape, dtype=torch.float32) for x in (qg, k, v))
    for i, j, visible in _tiles(first, last):
        p = (_scores(qg[i], k[j], visible, scale) - lse[..., i, None]).exp()
        dv_sum[j] += torch.einsum("hgij,ihgd->jhd", p, dog[i].float())
        dp = torch.einsum("ihgd,jhd->hgij", dog[i].float(), v[j].float())
        ds = p * (dp - delta[..., i, None]) * scale
        dk_sum[j] += torch.einsum("hgij,ihgd->jhd", ds, qg[i].float())
        dq_sum[i] += torch.einsum("hgij,jhd->ihgd", ds, k[j].float())
    dq.copy_(dq_sum.flatten(1, 2))
    dk.copy_(dk_sum)
    dv.copy_(dv_sum)
