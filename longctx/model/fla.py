"""Kernels of fla-core (MIT, fla-org/flash-linear-attention) for recurrent mixers on a GPU, and the
formulas that a CPU computes in their place.

On a GPU nothing falls back to a formula: it would be a hundred times slower.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from longctx.model.mixer import Batch, widened

# Before, and with Triton before 3.7.1, gradients are wrong on Hopper (fla #1262 and #640)
REMEDY = "pip install 'fla-core>=0.6.0' einops"


@functools.cache
def refusal() -> str | None:
    """Return why no kernel of fla-core can run, with a remedy, or None."""
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"on a GPU it takes the kernels of fla-core, which is not installed: {REMEDY}"
    if Version(found) < Version("0.6"):
        return f"fla-core {found} has wrong gradients on some GPUs: {REMEDY}"
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if is_hopper and Version(triton := version("triton")) < Version("3.7.1"):
        return f"fla-core has wrong gradients with Triton {triton}: pip install 'triton>=3.7.1'"
    try:
        importlib.import_module("fla.ops")
    except ImportError as error:
        return f"fla-core {found} cannot be imported ({error}): {REMEDY}"
    return None


def kernel(path: str) -> Any:
    """Return a function of fla, given as "module:name"; ValueError if it cannot run."""
    if reason := refusal():
        raise ValueError(f"a recurrent layer: {reason}")
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"fla.{module}"), name)


def documents_of(batch: Batch) -> dict[str, Tensor]:
    """Return the documents of sequences in a row as fla's kernels take them; wait for nothing."""
    return {"cu_seqlens": batch.offsets, "cu_seqlens_cpu": batch.offsets_on_host}


def short_convolution(x: Tensor, weight: Tensor, batch: Batch, naive: bool = False) -> Tensor:
    """Return silu(y) of the causal convolutions y of the channels of x (B, T, H, D), each with its
    row of `weight` (H · D, 1, taps). They stop at documents.
    """
    channels, taps = x.flatten(2), weight[:, 0].to(x.dtype)
    if x.is_cuda and not naive:
        convolution = kernel("modules.causal_conv1d:causal_conv1d")
        tokens = channels.reshape(1, -1, channels.shape[2])
        convolved, _ = convolution(tokens, taps, activation="silu", **documents_of(batch))
        return convolved.view(x.shape)
    total = torch.zeros_like(channels)
    for back in range(taps.shape[1]):
        moved = F.pad(channels, (0, 0, back, 0))[:, : channels.shape[1]]
        total = total + taps[:, -1 - back] * moved * (batch.positions >= back)[..., None]
    return F.silu(total).view(x.shape)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) · weight · silu(gate), of x (..., D)."""
    if x.is_cuda:
        fused = kernel("modules.norm.fused_norm_gate:rms_norm_gated")
        gated: Tensor = fused(x.contiguous(), gate.contiguous(), weight, None, eps=eps)
        return gated
    normed = F.rms_norm(widened(x), (x.shape[-1],), weight.to(widened(x).dtype), eps)
    return (normed * F.silu(widened(gate))).to(x.dtype)
