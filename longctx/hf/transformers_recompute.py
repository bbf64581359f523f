"""Recomputed layers of transformers' models. A layer saves its input and, if the backend is flash,
the outputs of its attention, so that backward computes no attention twice.

torch's selective checkpointing does the same, but looks at every operator from Python. The share
memory.offload of the layers saves to pinned host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from longctx.attention import Attention, Mask, Scores
from longctx.config.layout_config import MemoryConfig
from longctx.model.offload import HostBuffers, SavedTensors
from longctx.transformers import Documents


def recompute(layers: Any, documents: Documents, memory: MemoryConfig) -> None:
    """Let backward compute `layers` again."""
    offloaded = round((memory.offload or 0.0) * len(layers))
    tape: list[Layer] = []  # of the forward that runs
    for i, layer in enumerate(layers):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_recomputed, tape, documents, i, i < offloaded)


def _recomputed(
    tape: list[Layer],
    documents: Documents,
    i: int,
    is_offloaded: bool,
    function: Callable[..., Any],
    x: Tensor,
    *others: Any,
) -> Any:
    """Return function(x, *others), the outputs of layer `i`; x is the residual stream."""
    before, layer = tape[0] if i and tape else None, Layer(i, is_offloaded)
    masks = documents.masks
    tape[:] = [layer]

    @contextmanager
    def again() -> Iterator[None]:
        layer.is_complete = True
        layer.on_host.clear()  # its tensors are there
        if before is not None:
            before.prefetch()
        with documents.attending(layer.attend, masks):
            yield

    hooks = torch.autograd.graph.saved_tensors_hooks(partial(layer.packed, x), unpacked)
    with hooks if is_offloaded else nullcontext():
        return checkpoint(
            function,
            x,
            *others,
            use_reentrant=False,
            context_fn=lambda: (documents.attending(layer.attend, masks), again()),
            preserve_rng_state=False,
        )


class Layer:
    """What a layer saves, from its forward to its recomputation."""

    def __init__(self, index: int, is_offloaded: bool) -> None:
        self.index, self.is_offloaded = index, is_offloaded
        self.is_complete = False
        self.on_host: list[SavedTensors] = []
        self.outputs: list[SavedTensors] = []  # of its attentions, in their order

    def save(self, **tensors: Tensor) -> SavedTensors:
        """Save `tensors`, on the host if the layer is offloaded."""
        device = next(iter(tensors.values())).device
        saved = SavedTensors(
            tensors, HostBuffers.of(device, self.index) if self.is_offloaded else None
        )
        if self.is_offloaded:
            self.on_host.append(saved)
        return saved

    def prefetch(self) -> None:
        """Begin to copy to the device what is on the host."""
        for saved in self.on_host:
            saved.prefetch()
        self.on_host.clear()

    def packed(self, x: Tensor, saved: Tensor) -> Tensor | SavedTensors:
        """Save an input of the layer: the residual stream `x` on the host, others as they are."""
        return self.save(x=saved) if saved.data_ptr() == x.data_ptr() else saved

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, *others: Any) -> Tensor:
        """Return attention's output (B, T, H, D): saved in forward, and taken in backward.

        The `others` are mask and caller.
        """
        out: Tensor = _Kept.apply(q, k, v, scores.sinks, scores, *others, self)
        return out


def unpacked(saved: Tensor | SavedTensors) -> Tensor:
    """Return what `Layer.packed` saved."""
    return saved if isinstance(saved, Tensor) else saved.tensors()["x"]


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
        layer: Layer,
    ) -> Tensor:
        if layer.is_complete:
            kept = layer.outputs.pop(0).tensors()
            out, lse = kept["out"], kept["lse"]
        else:
            out, lse = caller.with_lse(q, k, v, mask, scores)
            layer.outputs.append(layer.save(out=out, lse=lse))
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.scores, ctx.mask, ctx.caller = scores._replace(sinks=None), mask, caller
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        scores = ctx.scores._replace(sinks=sinks)
        gradients = ctx.caller.backward(do, q, k, v, out, lse, ctx.mask, scores)
        return *gradients, *[None] * (8 - len(gradients))
