"""Recomputed layers of transformers' models. A layer saves its input and, if the backend is flash,
the outputs of its attention, so that backward computes no attention twice.

torch's selective checkpointing does the same, but looks at every operator from Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from longctx.attention import Attention, Mask, Scores
from longctx.transformers import Documents


def recompute(layers: Any, documents: Documents) -> None:
    """Let backward compute `layers` again."""
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_recomputed, documents)


def _recomputed(documents: Documents, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return function(*inputs), the outputs of a layer."""
    # Output and lse of each attention of the layer, from its forward to its recomputation
    outputs: list[tuple[Tensor, Tensor]] = []
    mask_of = documents.mask_of

    def attend(
        is_again: bool, q: Tensor, k: Tensor, v: Tensor, scores: Scores, *others: Any
    ) -> Any:
        return _Kept.apply(q, k, v, scores.sinks, scores, *others, outputs, is_again)

    def contexts() -> Any:
        first = documents.attending(partial(attend, False), mask_of)
        return first, documents.attending(partial(attend, True), mask_of)

    return checkpoint(
        function, *inputs, use_reentrant=False, context_fn=contexts, preserve_rng_state=False
    )


class _Kept(torch.autograd.Function):
    """Attention that a recomputed layer does not compute again: it takes what forward kept."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scores: Scores,
        mask: Mask,
        caller: Attention,
        outputs: list[tuple[Tensor, Tensor]],
        is_again: bool,
    ) -> Tensor:
        if not is_again:
            outputs.append(caller.with_lse(q, k, v, mask, scores))
        out, lse = outputs.pop(0) if is_again else outputs[-1]
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.scores, ctx.mask, ctx.caller = scores._replace(sinks=None), mask, caller
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        scores = ctx.scores._replace(sinks=sinks)
        gradients = ctx.caller.backward(do, q, k, v, out, lse, ctx.mask, scores)
        return *gradients, *[None] * (9 - len(gradients))
