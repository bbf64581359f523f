"""The bias of a key: what it adds to the scores of a head, after scale and softcap.

    s_ij = scale · q_i·k_j + b_j - b_r,   r = last_i,   lse_i = log Σ_j exp(s_ij)

ALiBi (arXiv 2108.12409) is b_j = slope · j, the forgetting transformer (arXiv 2503.02130) minus the
cumulative log of its gates: what is constant along a row cancels in the softmax. Biases grow with
the length, so everything of a row is relative to its last visible key: differences of near biases
are exact in fp32, and lse keeps its digits. The reference has no gradient, so that of b_j is Σ_i
ds_ij. `attention` adds the reference to the lse that it returns, and a sink counts as z - b_r.

Keys before `first_keys` weigh nothing (compare arXiv 2504.06949). If |scale · q_i·k_j| ≤ u_i, keys
up to n with u_i + log Σ_{j≤n} exp(b_j) - b_r < scale · q_i·k_r - log 2^24 have together less than
2^-24 of the weight of key r alone, which fp32 does not tell from 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import vector_norm

from longctx.kernels.attention import Intervals, Scores


def reference(key_bias: Tensor, last: Tensor | None) -> Tensor:
    """Return (B, H, Tq), without a gradient: the bias (B, H, Tk) of each query's last key.

    `last` is (B or 1, Tq). A query that sees nothing gets the bias of any key.
    """
    assert last is not None
    at = last.clamp(min=0).long()[:, None].expand(*key_bias.shape[:2], -1)
    return key_bias.detach().gather(2, at)


def relative_sinks(scores: Scores, last: Tensor | None) -> Tensor:
    """Return the sinks as the softmax of each query has them: (H, 1), or (B, H, Tq) with a bias."""
    assert scores.sinks is not None
    sinks = scores.sinks[:, None]
    return sinks if scores.key_bias is None else sinks - reference(scores.key_bias, last)


@torch.no_grad()
def first_keys(q: Tensor, k: Tensor, mask: Intervals, scores: Scores) -> Tensor:
    """Return (B, Hq, Tq) int32 like `mask.first` (B or 1, Tq): first keys that may weigh something.

    Fewer are skipped if the bias decreases inside a document.
    """
    assert scores.key_bias is not None and scores.scale is not None
    group, last, bias = q.shape[2] // k.shape[2], mask.last, scores.key_bias.double()
    own_k = k[torch.arange(len(k), device=k.device)[:, None], last.clamp(min=0).long()]
    own = (q * own_k.repeat_interleave(group, 2)).sum(3, dtype=torch.float32)
    # no product is larger than those of lengths
    of_q, of_k = (vector_norm(x, dim=3, dtype=torch.float32) for x in (q, k))
    bound = of_q * of_k.amax(1, keepdim=True).repeat_interleave(group, 2)
    # own is a sum of rounded products
    own, bound = (scores.scale * x.transpose(1, 2) for x in (own, 1.01 * bound))
    if scores.softcap is not None:
        own, bound = scores.softcap * (own / scores.softcap).tanh(), bound.clamp(max=scores.softcap)
    # a document's lift cancels: no query that sees its first key sees one before. Lifted, the
    # document continues the bias of the one before, which so weighs little in its sums
    first_visible = mask.first.gather(1, mask.qfirst.clamp(max=last.shape[1] - 1).long())
    begins_document = first_visible >= torch.arange(k.shape[1], device=k.device)
    decreases = -bias.diff(dim=2, prepend=bias[..., :1]).nan_to_num(posinf=0, neginf=0)
    bias = bias + (decreases.clamp(min=0) * begins_document[:, None]).cumsum(2)
    least = reference(bias, last) + own - bound - math.log(2**24)
    # NaN bounds nothing, nor does a product too great for fp16
    least = least.nan_to_num(nan=-math.inf, posinf=-math.inf)
    keys = torch.searchsorted(bias.logcumsumexp(2), least, out_int32=True)
    # they do not decrease along a row, as tiles assume
    return torch.maximum(keys, mask.first[:, None]).flip(2).cummin(2).values.flip(2)
