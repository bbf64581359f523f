"""Memory of layers that transformers computes: they are recomputed in backward, and measured.

A recomputed layer saves its input and, if the backend is flash, the outputs of its attention, so
that backward computes no attention twice. torch's selective checkpointing does the same, but looks
at every operator from Python.

Layers are measured without memory: a layer of each kind runs forward and backward on fake tensors,
and the bytes alive are counted.

Bytes of eager layers are linear in the tokens, so two runs give those of a layer and of a token.
Attention is ours: the planner adds what a backend takes next to its inputs and outputs. torch's
own MemTracker cannot count frozen weights, as LoRA has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from longctx.attention import Attention, Mask, Scores
from longctx.config.layout_config import MemoryConfig
from longctx.model import gpt, lora
from longctx.parallel.devices import dtype_of
from longctx.spec.step import Measured, MeasuredLayer, Workload
from longctx.transformers import Documents

COUNTS = (4096, 65536)  # tokens of the two runs
ROW = 256  # tokens of a sequence; some models have no more positions


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
        return [documents.attending(partial(attend, again), mask_of) for again in (False, True)]

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
        gradients = ctx.caller.backward(do, (q, k, v, out, lse), ctx.mask, scores)
        return *gradients, *[None] * (9 - len(gradients))


def measured_layers(workload: Workload, say: Callable[[str], None]) -> Measured:
    """Return the bytes of every layer of `workload` by memory.recompute.

    A model's own code may raise anything, for example if its shapes depend on values. Then `say`
    tells that a GPT of its sizes is predicted.
    """
    try:
        return {
            recompute: layers_of(replace(workload, memory=MemoryConfig(name).filled(name)))
            for recompute, name in {"none": "fast", "block": "balanced"}.items()
        }
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        say(f"memory     predicted as of a GPT of its sizes: its layers are not measured: {reason}")
        return {}


def layers_of(step: Workload) -> list[MeasuredLayer]:
    """Return the bytes of every layer of a step."""
    # torch without CUDA has no fake tensors of a GPU: a plan takes those of a CPU
    if step.device == "cuda" and not torch.cuda.is_available():
        return layers_of(replace(step, device="cpu"))
    # A layer is measured between others
    if step.model.layers == 1:
        return layers_of(replace(step, model=step.model.with_layers([0, 0])))[:1]
    with torch.device("meta"):
        model: Any = gpt.build(step.model, "flash", step.memory).train()
    if step.added or step.sharing.shards_weights:
        model.cast(dtype_of(step.precision))
    if step.added:
        lora.add(model, replace(step.lora, base=None))
    if not step.attention.description.has_backward:
        # Recomputed layers save no output of such a backend
        model.documents.attending = lambda *_: nullcontext()
    chain, config, measured = model.blocks, model.whole.config, {}
    layers, types = list(chain), vars(config).get("layer_types")
    kinds = [tuple((name, x.shape) for name, x in layer.named_parameters()) for layer in layers]
    with FakeTensorMode(allow_non_fake_inputs=True):
        # A model's own would compute its buffers, and set the random state back
        nn.Module.to_empty(model, device=step.device)
        for kind, layer in dict(zip(kinds, layers, strict=True)).items():
            # As in the middle of a model, between others
            other = next(another for another in layers if another is not layer)
            del chain[:]
            chain.extend([other, layer, other])
            config.num_hidden_layers = len(chain)
            if types:
                config.layer_types = [types[layers.index(layer)] for layer in chain]
            runs = [sizes(model, chain, step, tokens) for tokens in COUNTS]
            lines = [linear_regression(COUNTS, ends) for ends in zip(*runs, strict=True)]
            weights = sum(weight.numel() for weight in layer.parameters() if weight.ndim > 1)
            measured[kind] = MeasuredLayer(weights, *lines)
    return [measured[kind] for kind in kinds]


def sizes(model: Any, chain: nn.ModuleList, step: Workload, tokens: int) -> tuple[int, ...]:
    """Return bytes of the middle one of three layers: saved for backward, and the peak of its
    backward next to all that is saved; the peak of the last norm's; and the peak of its forward.
    """
    alive = Alive([*model.parameters(), *model.buffers()])
    # Bytes alive before each layer, then after the last norm, the last and the middle layer in
    # backward, each with the peak before
    marks: list[tuple[int, int]] = []

    def mark(_: Any) -> None:
        marks.append((alive.now, alive.peak))
        alive.peak = 0

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(marks) < len(chain):  # else it is recomputed, or a later run
            mark(None)
            if len(marks) > 1:
                inputs[0].register_hook(mark)

    def after(_: nn.Module, __: Any, outputs: Tensor | tuple[Tensor, ...]) -> None:
        if len(marks) == len(chain):
            out = outputs if isinstance(outputs, Tensor) else outputs[0]
            out.register_hook(mark)

    for layer in dict.fromkeys(chain):
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    shape, dtype = (tokens // ROW, ROW), dtype_of(step.precision)
    ids = torch.zeros(shape, dtype=torch.int64, device=step.device)
    positions = torch.arange(ROW, device=step.device).expand(shape)
    model.documents.begin(Mask.causal().bind(*shape, ROW, step.device))
    with alive, torch.autocast(step.device, dtype, enabled=dtype != torch.float32):
        out = model.backbone(input_ids=ids, position_ids=positions, use_cache=False)
    # autocast has let go of its copies of weights
    with alive:
        out.last_hidden_state.sum().backward()
    model.zero_grad()
    (_, (first, _), (last, forward), (end, norm), (begin, _), (_, peak)) = marks
    gradient = step.activation_bytes * step.model.channels * tokens
    return last - first, peak - (begin - gradient), norm - (end - 2 * gradient), forward - first


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, without `weights`."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.storages = WeakIdKeyDictionary({weight.untyped_storage(): True for weight in weights})
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._grouped_mm.default:
            function = grouped_product
        result = function(*args, **(kwargs or {}))
        tensors = (tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor))
        for storage in [tensor.untyped_storage() for tensor in tensors]:
            if storage not in self.storages:
                self.storages[storage] = True
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def add(self, size: int) -> None:
        """Count `size` more bytes."""
        self.now += size


def grouped_product(x: Tensor, y: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    """Return the memory of torch's grouped product, whose fake one takes bf16 alone."""
    groups = (len(offsets),) if x.ndim == y.ndim == 2 else ()
    return x.new_empty(*groups, x.shape[-2], y.shape[-1])
