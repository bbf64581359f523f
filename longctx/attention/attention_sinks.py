"""Learnable sinks: one logit for each query head that takes part in the softmax and has no value.

As in gpt-oss and StreamingLLM's zero sink (arXiv 2309.17453). No kernel knows of them, for
attention without sinks gives all that is needed: with its out o and lse,

    lse' = log(exp(lse) + exp(sink)),   o' = o · exp(lse - lse') = o · sigmoid(lse - sink)

and their gradients follow by way of o and lse.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, T, H, D) and lse (B, H, T) of attention with `sinks` (H,), from those without.

    A query that sees no key gets output 0 and its head's sink for lse.
    """
    sinks = sinks.to(lse.dtype)[:, None]
    sees_nothing = lse == float("-inf")
    # both -inf, they would have no gradient
    seen = lse.masked_fill(sees_nothing, 0.0)
    share = torch.sigmoid(seen - sinks).masked_fill(sees_nothing, 0.0)
    scaled = (out * share.transpose(1, 2)[..., None]).to(out.dtype)
    return scaled, torch.where(sees_nothing, sinks, torch.logaddexp(seen, sinks))


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise ValueError unless `sinks` has a logit for each head of q (B, T, H, D)."""
    heads = q.shape[2]
    if tuple(sinks.shape) != (heads,) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks of shape {tuple(sinks.shape)} and {sinks.dtype}: "
            f"give one number for each query head, ({heads},), in a floating type"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks are on {sinks.device}, q on {q.device}: move them to {q.device}")
