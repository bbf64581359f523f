"""LoRA (Hu et al., arXiv 2106.09685): frozen weights W, and beside each a low-rank product that is
trained.

    y = W x + s · B (A x),  s = alpha / rank,  A (rank, in) random,  B (out, rank) zero at first

With rslora s = alpha / √rank (arXiv 2312.03732), so that a high rank does not slow its additions.
q, k and v are one matrix here, and so are gate and up: their adapters share A. An adapter for peft
has one for each of them, with equal A. Merged, W + s · B A, the model is a plain GPT again. Of
experts, whose W are stacked by rows, A (experts · rank, in) and B are stacked too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longctx.kernels import linear
from longctx.model import packed
from longctx.model.gpt import GPT, Draw
from longctx.model.layers import Linear
from longctx.spec.model_config import LoraConfig

ADDED = (".lora_a", ".lora_b")  # ends of the names of what is trained


class LoraLinear(nn.Linear):
    """A linear layer with frozen weights and a trained product of two thin fp32 matrices."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = frozen.in_features, frozen.out_features
        self.weight, self.bias = frozen.weight, frozen.bias
        # Layers of transformers have no product of their own
        self.product = getattr(frozen, "product", linear)
        self.scale, self.is_on = scale, True
        self.experts = getattr(frozen, "experts", 1)
        wide: Any = {"dtype": torch.float32, "device": frozen.weight.device}
        self.lora_a = nn.Parameter(torch.empty(self.experts * rank, self.in_features, **wide))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank, **wide))
        self.init_added()

    def init_added(self, draw: Draw = lambda x, fill: fill(x)) -> None:
        """Draw the added product anew; it begins at zero."""
        draw(self.lora_a, partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.weight, self.bias)
        if not self.is_on:
            return y
        low = F.linear(x, self.lora_a.to(x.dtype)) * self.scale
        return y + F.linear(low, self.lora_b.to(low.dtype))

    @property
    def added(self) -> tuple[Any, ...]:
        """Return A, B and their factor, for `Experts`."""
        return (self.lora_a, self.lora_b, self.scale) if self.is_on else Linear.added


def add(model: GPT, config: LoraConfig) -> GPT:
    """Freeze `model` and add trained products to the layers of `config.targets`."""
    assert config.rank is not None
    model.requires_grad_(False)
    for block, path, target, packs in list(model.linears()):
        frozen: Any = block.get_submodule(path)
        if config.base is not None and packs:
            frozen.weight = packed.parameter(frozen.weight)
            if getattr(frozen, "experts", 1) == 1:
                frozen = Linear.like(frozen, packed.linear)
                block.set_submodule(path, frozen)
        if target in config.targets:
            block.set_submodule(path, LoraLinear(frozen, config.rank, config.factor))
    return model


def layers(model: GPT) -> list[LoraLinear]:
    """Return the layers of `model` that have a trained product beside their weight."""
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


@contextmanager
def off(model: GPT) -> Iterator[None]:
    """Let `model` compute without the products that were added."""
    added = layers(model)
    for layer in added:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in added:
            layer.is_on = True


@torch.no_grad()
def merge(model: GPT) -> GPT:
    """Add every trained product to its weight, in the embedding's dtype: `model` is plain then."""
    for name, layer in list(model.named_modules()):
        weights = {f"{name}.{own}": x for own, x in layer.named_parameters(recurse=False)}
        weight = weights.get(f"{name}.weight")
        if weight is not None and (isinstance(layer, LoraLinear) or packed.is_packed(weight)):
            rows = MergedRows(f"{name}.weight", weights, getattr(layer, "scale", 1.0))
            dtype = model.embed.weight.dtype if packed.is_packed(weight) else weight.dtype
            plain = Linear.like(layer)
            plain.weight = nn.Parameter(rows[0 : len(weight)].to(dtype))
            model.set_submodule(name, plain)
    return model.requires_grad_(True)


class MergedRows:
    """The weight `name` of a checkpoint, unpacked, with what LoRA trained added, in fp32 then:
    x[first:last] computes those rows alone, since a rank may hold a part of them.
    """

    def __init__(self, name: str, weights: Mapping[str, Any], factor: float) -> None:
        self.weight, layer = weights[name], name.removesuffix(".weight")
        self.a, self.b = (weights.get(f"{layer}.lora_{x}") for x in "ab")
        self.shape, self.factor = self.weight.shape[:1], factor

    def __getitem__(self, at: slice) -> Tensor:
        rows = self.weight[at]
        if packed.is_packed(rows):
            rows = packed.unpacked(rows, torch.float32)
        if self.a is None or self.b is None:
            return rows
        lora_a, rank = self.a[:], self.b.shape[1]
        # Stacked weights of experts: each has its rows of W and B, and of A
        each = self.shape[0] * rank // len(lora_a)
        parts = pairwise([at.start, *range((at.start // each + 1) * each, at.stop, each), at.stop])
        added = [self.b[start:end] @ lora_a[start // each * rank :][:rank] for start, end in parts]
        return rows.float() + self.factor * torch.cat(added)
