"""Attention of one query per row over a key-value cache, split over the keys.

    s_j = scale · q·k_j  for first <= j <= last,   lse = log Σ_j exp(s_j)
    o = Σ_j exp(s_j - lse) v_j

A query alone would keep one program busy while all others idle, so the keys of a row are split
into parts: a program computes o and lse of one part for all query heads of one key-value head, so
that each key is read once, and a second kernel combines the parts (Flash-Decoding, Dao et al.,
2023):

    lse = log Σ_s exp(lse_s),   o = Σ_s exp(lse_s - lse) o_s

The number of parts is fixed at the launch, their ends are read on the device: so the same launch
serves every length, in a CUDA graph too. Exponentials are taken in base 2. Nothing
is added atomically, so every result is deterministic. A row that sees nothing gets 0. The sink of a
head joins where its parts are combined. A key bias is relative to that of the last key, in every
part (key_bias.py).

Legend: B batch, T tokens of room in the cache, Hq and Hkv heads, GROUP query heads per key-value
head, padded to ROWS, D head size, padded to PAD, both powers of two, BN keys of a tile. q, out (B,
Hq, D); k, v (B, T, Hkv, D); first, last (B,).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longctx.kernels.attention import Scores
from longctx.kernels.attention.key_bias import relative_sinks
from longctx.kernels.attention.launch import multiprocessors

LOG2E = tl.constexpr(1.4426950408889634)
TILE = 1 << 14  # bytes of a tile of keys; with STAGES of keys and values under 99 KiB
STAGES = 3
PROGRAMS = 2  # of one multiprocessor at a time, by that memory
TOGETHER = tl.constexpr(16)  # parts that are combined at a time
# Of fp32, to which a product in parts comes as close; one in fp32 compiles for minutes. AMD's GPUs
# have no parts in tf32.
PRECISION, PRECISION_ON_AMD = "tf32x3", "bf16x6"


@triton.jit(do_not_specialize=["Hkv", "parts"])
def part_kernel(
    q, k, v, first, last, bias, part_out, part_lse, scale_log2,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_bb, stride_bh,
    Hkv, parts,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """part_out (B, Hq, parts, D) and part_lse (B, Hq, parts), in base 2, of a part of the keys."""
    part, bh = tl.program_id(0) % parts, tl.program_id(0) // parts
    b, h = (bh // Hkv).to(tl.int64), bh % Hkv
    # queries of the group, which share the keys
    g, d = tl.arange(0, ROWS), tl.arange(0, PAD)
    own = (g < GROUP)[:, None] & (d < D)[None, :]
    heads = bh.to(tl.int64) * GROUP + g  # of all rows
    qi = tl.load(q + heads[:, None] * D + d[None, :], mask=own, other=0.0)
    k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh

    # whole tiles for each part, the last ones may have none
    begin, end = tl.load(first + b), tl.load(last + b) + 1
    if BIAS:
        bias += b * stride_bb + (h * GROUP + tl.minimum(g, GROUP - 1))[:, None] * stride_bh
        bias_r = tl.load(bias + tl.maximum(end - 1, 0))
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BN)
    size = tl.cdiv(tiles, parts) * BN
    begin += part * size
    end = tl.minimum(begin + size, end)

    # online softmax over the tiles of the part
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    for n in tl.range(begin, end, BN, num_stages=STAGES):
        j = n + tl.arange(0, BN)
        inside = (j < end)[:, None] & (d < D)[None, :]
        at = j.to(tl.int64)[:, None]
        # keys and values of the tile, each read once for the whole group
        kj = tl.load(k + at * stride_kt + d[None, :], mask=inside, other=0.0)
        vj = tl.load(v + at * stride_vt + d[None, :], mask=inside, other=0.0)
        s = tl.dot(qi, kj.T, input_precision=PRECISION) * scale_log2
        if BIAS:
            bias_j = tl.load(bias + j[None, :], mask=(j < end)[None, :], other=0.0)
            s += (bias_j - bias_r) * LOG2E
        s = tl.where((j < end)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # exponentials in base 2; old sums are scaled to the new maximum
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(vj.dtype), vj, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new

    # epilogue: a part without keys has lse -inf and out 0
    rows = heads * parts + part
    l = tl.where(l == 0.0, 1.0, l)
    tl.store(part_out + rows[:, None] * D + d[None, :], acc / l[:, None], mask=own)
    tl.store(part_lse + rows, m + tl.log2(l), mask=g < GROUP)


@triton.jit(do_not_specialize=["parts", "count"])
def combine_kernel(
    part_out, part_lse, sinks, out, parts, count,
    D: tl.constexpr, PAD: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out (B, Hq, D) of the parts of one head; `count` sinks (Hq,), or (B, Hq) with a key bias."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    part_out += row * parts * D
    part_lse += row * parts
    m = float("-inf")
    l = 0.0
    if SINKS:
        m = tl.load(sinks + tl.program_id(0) % count) * LOG2E
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([PAD], tl.float32)
    for n in tl.range(0, parts, TOGETHER):
        s = n + tl.arange(0, TOGETHER)
        lse = tl.load(part_lse + s, mask=s < parts, other=float("-inf"))
        inside = (s < parts)[:, None] & (d < D)[None, :]
        o = tl.load(part_out + s[:, None] * D + d[None, :], mask=inside, other=0.0)
        # parts weigh by exp(lse), relative to the largest so far
        m_new = tl.maximum(m, tl.max(lse, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # parts of nothing
        w = tl.exp2(lse - shift)
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(w, 0)
        acc = acc * alpha + tl.sum(o * w[:, None], 0)
        m = m_new
    acc = acc / tl.where(l == 0.0, 1.0, l)
    tl.store(out + row * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def launch_config(group: int, head_dim: int, itemsize: int) -> tuple[int, int, int]:
    """Return ROWS, PAD and BN for heads of `head_dim` channels of `itemsize` bytes."""
    # products take tiles of 16 at least; small groups are padded to that
    pad = max(16, triton.next_power_of_2(head_dim))
    return max(16, triton.next_power_of_2(group)), pad, min(128, TILE // (pad * itemsize))


def parts_of(rows: int, length: int, kv_heads: int, tile: int, device: torch.device) -> int:
    """Return the parts of each row's keys: enough to keep every multiprocessor busy, each at least
    a tile of the `length` keys.
    """
    # one wave of programs, so that none waits for another
    programs = PROGRAMS * multiprocessors(device)
    return max(1, min(-(-length // tile), programs // (rows * kv_heads)))


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    parts: int | None = None,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Return out (B, Hq, D) of q (B, Hq, D) over k, v (B, T, Hkv, D).

    Row b sees keys first[b] .. last[b], int32. k and v are contiguous in D. `sinks` (Hq,) and
    `key_bias` (B, Hq, T) float32: see `Scores`. `parts` is for tests; None: `parts_of`. Waits for
    nothing.
    """
    (B, Hq, D), (T, Hkv) = q.shape, k.shape[1:3]
    group = Hq // Hkv
    # the same launch serves every length, in a CUDA graph too
    rows, pad, tile = launch_config(group, D, q.element_size())
    parts = parts or parts_of(B, T, Hkv, tile, q.device)
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    part_out = q.new_empty(B, Hq, parts, D, dtype=torch.float32)
    part_lse = q.new_empty(B, Hq, parts, dtype=torch.float32)
    scores, ends = Scores(scale, None, sinks, key_bias), last[:, None]
    own = part_lse if sinks is None else relative_sinks(scores, ends)
    bias, has_bias = part_lse if key_bias is None else key_bias, key_bias is not None
    with torch.cuda.device_of(q):
        part_kernel[(B * Hkv * parts,)](
            q, k, v, first, last, bias, part_out, part_lse, scale * LOG2E.value,
            *k.stride()[:3], *v.stride()[:3], *bias.stride()[:2], Hkv, parts,
            group, rows, D, pad, tile, STAGES,
            PRECISION_ON_AMD if torch.version.hip else PRECISION, has_bias, num_warps=4,
        )  # fmt: skip
        given = part_out, part_lse, own, out, parts, own.numel()
        combine_kernel[(B * Hq,)](*given, D, pad, sinks is not None, num_warps=2)
    return out
