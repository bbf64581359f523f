"""Sinks in plain torch: for tiles on a CPU, and for backends of others, whose kernels have none.

    lse' = log(exp(lse) + exp(z)),   o' = o · exp(lse - lse') = o · sigmoid(lse - z)

z is the logit of a head's sink, which joins its softmax and has no value, as in gpt-oss and
StreamingLLM's zero sink (arXiv 2309.17453). Autograd differentiates it by way of o and lse.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (B, T, H, D) and lse (B, H, T) with `sinks`, from out and lse without.

    `sinks` are the `relative_sinks`. A query that sees no key gets output 0 and its sink for lse.
    """
    sinks = sinks.to(lse.dtype)
    sees_nothing = lse == float("-inf")
    # both -inf, they would have no gradient
    seen = lse.masked_fill(sees_nothing, 0.0)
    share = torch.sigmoid(seen - sinks).masked_fill(sees_nothing, 0.0)
    scaled = (out * share.transpose(1, 2)[..., None]).to(out.dtype)
    return scaled, torch.where(sees_nothing, sinks, torch.logaddexp(seen, sinks))


def gradient_of_sinks(
    sinks: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """Return (H,): a sink takes p = exp(z - lse) of each query, and scales out by 1 - p.

    `sinks` are the `relative_sinks`.
    """
    p = torch.exp(sinks.to(lse.dtype) - lse).masked_fill(lse == float("-inf"), 0.0)
    delta = (do * out).sum(-1, dtype=lse.dtype).transpose(1, 2)
    return -(p * (delta if dlse is None else delta - dlse)).sum((0, 2))
