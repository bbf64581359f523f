"""Masks bound to the lengths of a call; causal and full ones are kept for the next call.

Binding launches several small kernels, and whoever calls `attention()` with `Mask.causal()` binds
in every call. Causal and full masks depend on the lengths alone, and one row stands for the whole
batch. Any other mask is of one batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.attention.mask import Mask
from longctx.kernels.flash_op import unobserved
from longctx.kernels.relaunch import stream_of

MOST_KEPT = 16
MOST_SEEN = 1024
_kept: dict[tuple[Any, ...], Mask] = {}
_seen: set[tuple[Any, ...]] = set()  # keys of masks that were asked for once


def bound(mask: Mask, q: Tensor, keys: int) -> Mask:
    """`mask` for q (B, Tq, Hq, D) and so many keys; kept if it is causal or full and is asked for
    again.
    """
    pure = mask.qfirst is None and mask.exchange is None and mask.kind in ("causal", "full")
    if not pure or not unobserved(q):
        return newly_bound(mask, q, keys)
    stream = 0
    if q.is_cuda:
        if torch.cuda.is_current_stream_capturing():  # a graph would outlive what is kept
            return newly_bound(mask, q, keys)
        stream = stream_of(q.get_device())
    inference = torch.is_inference_mode_enabled()
    key = mask.kind, mask.window, q.shape[1], keys, q.device, stream, inference
    kept = _kept.get(key)
    if kept is not None:
        return kept
    kept = newly_bound(mask, q, keys)
    # lengths that come once, as of texts that are scored, would only fill memory
    if key in _seen:
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = kept
    if len(_seen) >= MOST_SEEN:
        _seen.clear()
    _seen.add(key)
    return kept


def newly_bound(mask: Mask, q: Tensor, keys: int) -> Mask:
    """`mask` for q (B, Tq, Hq, D) and so many keys."""
    return mask.bind(q.shape[0], q.shape[1], keys, q.device)


def forget() -> None:
    """Keep no mask, and none that was asked for."""
    _kept.clear()
    _seen.clear()
