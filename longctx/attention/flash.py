"""flash: our own FlashAttention, fused and exact in O(T) memory.

Triton on a GPU, tiles in torch on a CPU; the kernels are in longctx/kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longctx.attention.description import DESCRIPTIONS
from longctx.attention.mask import Mask
from longctx.attention.registry import AttentionRequest, Backend, Gradients, Output, register
from longctx.kernels import HAS_TRITON
from longctx.kernels.attention import IMPLEMENTATIONS, SHORT, Intervals, Saved, Scores, launch
from longctx.kernels.attention.flash_op import flash_backward, forward_for, implementation, runs
from longctx.kernels.attention.key_bias import first_keys, relative_sinks
from longctx.kernels.attention.sinks import with_sinks


class Flash(Backend):
    """Any interval mask and length, grouped-query, fp32, bf16, fp16; the lse is differentiable.

    `kernel`: portable runs on every GPU, hopper on Hopper, ampere on NVIDIA GPUs from sm_80 on, for
    the tensors of its row of `IMPLEMENTATIONS`. The last two add dq up in any order unless torch
    uses deterministic algorithms. auto is hopper if that runs, ampere on sm_8x and sm_12x, and
    portable otherwise.

    `prune`: with a key bias, keys that weigh nothing are skipped.

    In portable NaN and inf reach only the rows that see them. In the other kernels they also reach
    rows of the same tile.
    """

    description = DESCRIPTIONS["flash"]

    def refusal(self, request: AttentionRequest) -> str | None:
        if request.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"its kernels take fp32, bf16 and fp16, not {request.dtype}; use attention=naive"
        kernel = str(request.options.get("kernel", "auto"))
        shape = request.device, request.dtype, request.head_dim
        asked = None if kernel in ("auto", "portable") else IMPLEMENTATIONS[f"triton-{kernel}"]
        if asked and not runs(f"triton-{kernel}", *shape):
            taken = f"bf16 and fp16 with head sizes in {asked.head_sizes} on {asked.gpus}"
            return f"kernel={kernel} takes {taken}; use attention.options.kernel=portable"
        name = implementation(*shape, kernel)
        own = IMPLEMENTATIONS[name]
        if name == "torch-tiled":
            return None
        if request.device.type == "cpu" and request.dtype == torch.bfloat16:
            reason = "Triton's interpreter computes bf16 products wrongly"
            return f"{reason}; use fp32 or fp16, or unset TRITON_INTERPRET"
        if not own.takes(request.dtype.itemsize, request.head_dim):
            limits = f"{own.head_sizes[0]} to {own.head_sizes[-1]}"
            return f"head size {request.head_dim} is outside {limits}; use attention=naive"
        if not HAS_TRITON:
            return "triton is not installed; `pip install triton`, or use attention=sdpa"
        return None

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, **options: Any
    ) -> Output:
        kernel = options.get("kernel", "auto")
        if options.get("prune") and scores.key_bias is not None:
            return self._pruned(mask, scores, kernel, q, k, v)
        chosen = implementation(q.device, q.dtype, q.shape[3], kernel)
        given = q, k, v, scores.sinks, scores.key_bias
        out, lse = forward_for(*given)(*given, _intervals(mask), scores, chosen)
        return out, lse, chosen

    def _pruned(self, mask: Mask, scores: Scores, kernel: str, *qkv: Tensor) -> Output:
        """Do as `run` without keys that weigh nothing. Key-value heads have intervals of their own:
        kernels see a batch of them, with the query heads of a group as heads.
        """
        B, Tk, Hkv, _ = qkv[1].shape
        assert mask.first is not None and mask.last is not None and scores.key_bias is not None
        first = first_keys(qkv[0], qkv[1], _intervals(mask), scores)
        first = first.unflatten(1, (Hkv, -1)).amin(2).flatten(0, 1)
        last = mask.last[:, None].expand(B, Hkv, -1).flatten(0, 1)
        own = replace(Mask.bound(first, last, Tk), window=mask.window)
        qs, ks, vs = (x.unflatten(2, (Hkv, -1)).transpose(1, 2).flatten(0, 1) for x in qkv)
        bias = scores.key_bias.unflatten(1, (Hkv, -1)).flatten(0, 1)
        given = scores._replace(sinks=None, key_bias=bias)
        out, lse, chosen = self.run(qs, ks, vs, own, given, kernel=kernel)
        out = out.unflatten(0, (B, Hkv)).transpose(1, 2).flatten(2, 3)
        lse = lse.unflatten(0, (B, Hkv)).flatten(1, 2)
        if scores.sinks is not None:  # of other heads in each row of the batch
            out, lse = with_sinks(out, lse, relative_sinks(scores, mask.last))
        return out, lse, chosen

    def backward(
        self, do: Tensor, saved: Saved, mask: Mask, scores: Scores, **options: Any
    ) -> Gradients:
        q, kernel = saved.q, options.get("kernel", "auto")
        chosen = implementation(q.device, q.dtype, q.shape[3], kernel)
        return flash_backward(do, None, saved, _intervals(mask), scores, chosen)

    def kernels_change_at(self, q: Tensor, length: int) -> int:
        return launch.longest_bucket(launch.PORTABLE, q, length) if q.is_cuda else 0


def _intervals(mask: Mask) -> Intervals:
    """Return the `Intervals` of a bound mask."""
    ends: tuple[Any, Any, Any, Any] = mask.first, mask.last, mask.qfirst, mask.qlast
    unbounded = "brief" if ends[2].shape[-1] <= SHORT else "long"
    span = "packed" if mask.doc_ids is not None else "window" if mask.window else unbounded
    if mask.window is not None and mask.window <= SHORT:
        span = "short" if mask.window <= SHORT // 2 else "medium"
    return Intervals(*ends, span, mask.starts if span == "packed" else mask.first)


register("flash", Flash())
