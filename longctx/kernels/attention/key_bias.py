"""The bias of a key: what it adds to the scores of a head, after scale and softcap.

    s_ij = scale · q_i·k_j + b_j - b_r,   r = last_i,   lse_i = log Σ_j exp(s_ij)

ALiBi (arXiv 2108.12409) is b_j = slope · j, the forgetting transformer (arXiv 2503.02130) minus the
cumulative log of its gates: what is constant along a row cancels in the softmax. Biases grow with
the length, so everything of a row is relative to its last visible key: differences of near biases
are exact in fp32, and lse keeps its digits. The reference has no gradient, so that of b_j is Σ_i
ds_ij. `attention` adds the reference to the lse that it returns, and a sink counts as z - b_r.
"""

from __future__ import annotations

from torch import Tensor

from longctx.kernels.attention import Scores


def reference(key_bias: Tensor, last: Tensor | None) -> Tensor:
    """Return (B, H, Tq), without a gradient: the bias (B, H, Tk) of each query's last key.

    `last` is (B or 1, Tq). Queries that see nothing have that of any key.
    """
    assert last is not None
    at = last.clamp(min=0).long()[:, None].expand(*key_bias.shape[:2], -1)
    return key_bias.detach().gather(2, at)


def relative_sinks(scores: Scores, last: Tensor | None) -> Tensor:
    """Return the sinks as the softmax of each query has them: (H, 1), or (B, H, Tq) with a bias."""
    assert scores.sinks is not None
    sinks = scores.sinks[:, None]
    return sinks if scores.key_bias is None else sinks - reference(scores.key_bias, last)
