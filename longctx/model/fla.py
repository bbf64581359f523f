"""Kernels of fla-core (MIT, fla-org/flash-linear-attention) for recurrent mixers on a GPU, and the
formulas that a CPU computes in their place.

On a GPU nothing falls back to a formula: it would be a hundred times slower.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
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


def short_convolution(
    x: Tensor, weights: Sequence[Tensor], batch: Batch, naive: bool = False
) -> Tensor:
    """Return silu(y) of the causal convolutions y of the channels of x (B, T, H, D). They stop at
    documents. The weights are taps (H · D, 1, taps), and biases (H · D,) if there are some.
    """
    channels, (taps, *biases) = x.flatten(2), (weight.to(x.dtype) for weight in weights)
    taps = taps[:, 0]
    if x.is_cuda and not naive:
        convolution = kernel("modules.causal_conv1d:causal_conv1d")
        tokens = channels.reshape(1, -1, channels.shape[2])
        convolved, _ = convolution(tokens, taps, *biases, activation="silu", **documents_of(batch))
        return convolved.view(x.shape)
    total = sum(biases, torch.zeros_like(channels))
    for back in range(taps.shape[1]):
        moved = F.pad(channels, (0, 0, back, 0))[:, : channels.shape[1]]
        total = total + taps[:, -1 - back] * moved * (batch.positions >= back)[..., None]
    return F.silu(total).view(x.shape)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: str = "silu",
    first: bool = False,
) -> Tensor:
    """Return rms_norm(x) · weight · activation(gate) of x (..., D), or if the gate is `first`
    rms_norm(x · silu(gate)) · weight.
    """
    gate = gate.view(x.shape).to(x.dtype)
    if x.is_cuda and first:
        fused, size = kernel("modules.norm.layernorm_gated:rmsnorm_fn"), x.shape[-1]
        flat = x.flatten(2), weight.flatten(), None, gate.flatten(2), eps, size, False
        gated: Tensor = fused(*flat).view(x.shape)
    elif x.is_cuda:
        fused = kernel("modules.norm.fused_norm_gate:rms_norm_gated")
        gated = fused(x.contiguous(), gate.contiguous(), weight, None, activation, eps=eps)
    else:
        wide, factor = widened(x), getattr(F, activation)(widened(gate))
        normed = F.rms_norm(wide * factor if first else wide, x.shape[-1:], eps=eps) * weight
        gated = (normed if first else normed * factor).to(x.dtype)
    return gated
