"""FlashAttention's algorithm in plain torch, for CPUs; never a (Tq, Tk) matrix.

If a sequence is made of causal documents, or sees everything, each document goes to torch's own
fused CPU kernel; any other interval mask (windows, Tq ≠ Tk, shards) is computed tile by tile here.
Equations and letters are those of portable.py. Shapes: q, o, do (B, Tq, Hq, D); k, v
(B, Tk, Hkv, D); lse, delta (B, Hq, Tq); intervals (B or 1, T).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from longctx.kernels.attention import Gradients, Intervals, Saved, Scores
from longctx.kernels.attention.key_bias import relative_sinks
from longctx.kernels.attention.sinks import gradient_of_sinks, with_sinks

# queries × keys of a tile: small enough for L2, large enough for the matrix library
ROWS = 256
COLS = 1024


def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return out like q and lse (B, Hq, Tq) float32.

    The last dimension of q, k and v must be contiguous: torch's kernel assumes it.
    """
    # each sequence by itself: its documents are its own
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    for b in range(q.shape[0]):
        ends = _of_sequence(intervals, b)
        plain = not scores.softcap and scores.key_bias is None
        documents = fused_documents(*ends, k.shape[1]) if plain else None
        if documents is None:
            # any mask: online softmax, tile by tile
            tiled = Saved(q[b], k[b], v[b], out[b], lse[b])
            _forward_tiles(tiled, *ends, _of_row(scores, b))
            continue
        # causal documents: torch's fused kernel, one call each
        for start, end, causal in documents:
            rows, cols = slice(start, end), slice(start, end) if causal else slice(0, k.shape[1])
            o, lse[b, :, rows] = fused(q[b, rows], k[b, cols], v[b, cols], scores.scale, causal)
            out[b, rows] = o
    if scores.sinks is None:
        return out, lse
    return with_sinks(out, lse, relative_sinks(scores, intervals.last))


def backward(
    do: Tensor, dlse: Tensor | None, saved: Saved, intervals: Intervals, scores: Scores
) -> Gradients:
    """Return dq, dk, dv, dsinks and dkey_bias for the gradients do of out and dlse of lse."""
    do = do.contiguous()
    q, k, v, out, lse = saved
    # keys out of sight of all queries keep zero gradients
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dbias = None if scores.key_bias is None else torch.zeros(scores.key_bias.shape)
    for b in range(q.shape[0]):
        ends = _of_sequence(intervals, b)
        # torch's kernel knows no gradient of the lse
        plain = dlse is None and not scores.softcap and dbias is None
        documents = fused_documents(*ends, k.shape[1]) if plain else None
        if documents is None:
            # any mask: tile by tile
            delta = (do[b].float() * out[b].float()).sum(-1).T
            delta = delta if dlse is None else delta - dlse[b]
            of_one = Saved(*(x[b] for x in saved))
            gradients = _backward_tiles(do[b], delta, of_one, *ends, _of_row(scores, b))
            targets = dq[b], dk[b], dv[b], *(() if dbias is None else (dbias[b],))
            for target, gradient in zip(targets, gradients, strict=False):
                target.copy_(gradient)
            continue
        for start, end, causal in documents:
            rows, cols = slice(start, end), slice(start, end) if causal else slice(0, k.shape[1])
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads(do[b, rows]),
                _heads(q[b, rows]),
                *_grouped(q.shape[2], k[b, cols], v[b, cols]),
                _heads(out[b, rows]),
                lse[b : b + 1, :, rows].contiguous(),
                0.0,
                causal,
                scale=scores.scale,
            )
            dq[b, rows] = grads[0][0].transpose(0, 1)
            # a group's query heads share its key-value head: their gradients add up
            for target, grad in ((dk, grads[1]), (dv, grads[2])):
                of_group = grad[0].unflatten(0, (k.shape[2], -1)).float()
                target[b, cols] += of_group.sum(1).transpose(0, 1).to(k.dtype)
    dsinks = None
    if scores.sinks is not None:
        sinks = relative_sinks(scores, intervals.last)
        dsinks = gradient_of_sinks(sinks, do, dlse, out, lse)
    return Gradients(dq, dk, dv, dsinks, dbias)


def _of_sequence(intervals: Intervals, b: int) -> tuple[Tensor, Tensor]:
    """Return first and last (Tq,) of sequence b."""
    first, last = intervals.first, intervals.last
    return first[b % first.shape[0]], last[b % last.shape[0]]


def _of_row(scores: Scores, b: int) -> Scores:
    """Return the scores of sequence b; the key bias is (Hq, Tk)."""
    return scores if scores.key_bias is None else scores._replace(key_bias=scores.key_bias[b])


def fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, D) and lse (Hq, T) of torch's kernel, from q and keys (T, H, D)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads(q), *_grouped(q.shape[1], k, v), is_causal=causal, attn_mask=bias, scale=scale
    )
    return out[0].transpose(0, 1), lse[0]


def fused_documents(first: Tensor, last: Tensor, Tk: int) -> list[tuple[int, int, bool]] | None:
    """Return (start, end, causal) documents for torch's fused kernel, or None for other masks."""
    Tq = first.shape[0]
    if bool((first == 0).all()) and bool((last == Tk - 1).all()):
        return [(0, Tq, False)]
    # a document begins with each new first key
    starts = torch.nonzero(torch.cat([first.new_ones(1), first.diff()])).flatten()
    causal = Tq == Tk and torch.equal(last, torch.arange(Tq, dtype=last.dtype))
    if not causal or not torch.equal(first[starts].long(), starts):
        return None
    bounds = [*starts.tolist(), Tq]
    return [(s, e, True) for s, e in itertools.pairwise(bounds)]


def _heads(x: Tensor) -> Tensor:
    """Turn (T, H, D) into (1, H, T, D)."""
    return x.transpose(0, 1)[None]


def _grouped(Hq: int, *tensors: Tensor) -> list[Tensor]:
    """Turn keys or values (T, Hkv, D) into (1, Hq, T, D), heads repeated for their group."""
    return [_heads(x.repeat_interleave(Hq // x.shape[1], dim=1)) for x in tensors]


def _tiles(first: Tensor, last: Tensor) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield (rows, keys, visible) of every tile in sight; `visible` is None if all of it is."""
    for i in range(0, first.shape[0], ROWS):
        f, la = first[i : i + ROWS], last[i : i + ROWS]
        for j in range(int(f[0]), int(la[-1]) + 1, COLS):
            end = min(j + COLS, int(la[-1]) + 1)
            keys = torch.arange(j, end)
            all_seen = int(f[-1]) <= j and end - 1 <= int(la[0])
            visible = None if all_seen else (keys >= f[:, None]) & (keys <= la[:, None])
            yield slice(i, i + len(f)), slice(j, end), visible


def _scores(
    q: Tensor, k: Tensor, visible: Tensor | None, scores: Scores, keys: slice, last: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return scores (Hkv, G, rows, keys) float32, -inf out of sight, and tanh of a softcap.

    q is (rows, Hkv, G, D), k (keys, Hkv, D), `keys` their places, `last` (rows,).
    """
    assert scores.scale is not None
    s = torch.einsum("ihgd,jhd->hgij", q.float(), k.float()) * scores.scale
    tanh = None
    if scores.softcap:
        tanh = (s / scores.softcap).tanh()
        s = scores.softcap * tanh
    if scores.key_bias is not None:
        bias = scores.key_bias.unflatten(0, s.shape[:2])
        s += bias[..., None, keys] - bias[..., last.long().clamp(min=0)][..., None]
    return s if visible is None else s.masked_fill(~visible, float("-inf")), tanh


def _forward_tiles(x: Saved, first: Tensor, last: Tensor, scores: Scores) -> None:
    """Write out and lse of one sequence (T, H, D), with online softmax over tiles of keys."""
    G = x.q.shape[1] // x.k.shape[1]
    # query heads of a group share their key-value head
    qg, og = x.q.unflatten(1, (-1, G)), x.out.unflatten(1, (-1, G))
    m = torch.full((x.k.shape[1], G, x.q.shape[0]), float("-inf"))
    l = torch.zeros_like(m)
    acc = torch.zeros(x.k.shape[1], G, *x.q.shape[::2])
    for i, j, visible in _tiles(first, last):
        s, _ = _scores(qg[i], x.k[j], visible, scores, j, last[i])
        m_new = torch.maximum(m[..., i], s.amax(-1))
        # a query that has seen nothing yet: -inf - -inf would be NaN
        shift = m_new.masked_fill(m_new == float("-inf"), 0.0)
        p, alpha = (s - shift[..., None]).exp(), (m[..., i] - shift).exp()
        l[..., i] = l[..., i] * alpha + p.sum(-1)
        pv = torch.einsum("hgij,jhd->hgid", p, x.v[j].float())
        acc[..., i, :] = acc[..., i, :] * alpha[..., None] + pv
        m[..., i] = m_new
    og.copy_((acc / l.masked_fill(l == 0, 1.0)[..., None]).permute(2, 0, 1, 3))
    x.lse.copy_((m + l.log()).flatten(0, 1))


def _backward_tiles(
    do: Tensor, delta: Tensor, saved: Saved, first: Tensor, last: Tensor, scores: Scores
) -> tuple[Tensor, ...]:
    """Return dq, dk, dv and dkey_bias, fp32, of one sequence (T, H, D)."""
    q, k, v, _, lse = saved
    G = q.shape[1] // k.shape[1]
    qg, dog = (x.unflatten(1, (-1, G)) for x in (q, do))
    # the same grouping for the saved sums
    lse, delta = (x.unflatten(0, (-1, G)) for x in (lse, delta))
    # p of a query that sees nothing is exp(-inf) = 0
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (qg, k, v))
    dbias = torch.zeros(q.shape[1], k.shape[0])
    for i, j, visible in _tiles(first, last):
        s, tanh = _scores(qg[i], k[j], visible, scores, j, last[i])
        p = (s - lse[..., i, None]).exp()
        dv[j] += torch.einsum("hgij,ihgd->jhd", p, dog[i].float())
        dp = torch.einsum("ihgd,jhd->hgij", dog[i].float(), v[j].float())
        ds = p * (dp - delta[..., i, None])
        if scores.key_bias is not None:
            dbias[:, j] += ds.sum(2).flatten(0, 1)
        ds *= scores.scale
        if tanh is not None:
            ds *= 1 - tanh.square()
        dk[j] += torch.einsum("hgij,ihgd->jhd", ds, qg[i].float())
        dq[i] += torch.einsum("hgij,jhd->ihgd", ds, k[j].float())
    return dq.flatten(1, 2), dk, dv, dbias
