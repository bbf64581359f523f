"""MXFP4: values of four bits with a power of two for every 32, as gpt-oss's folders have experts.

NAME_blocks (experts, rows, columns / 32, 16) has two values in a byte, the low bits first, and
NAME_scales (experts, rows, columns / 32) a byte s for the factor 2^(s - 127) of 32 values (OCP
Microscaling Formats 1.0). They are read as the tensor NAME (experts, columns, rows) in bf16, which
holds every such value exactly.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of bits 000 to 111; then negative
BLOCKS, SCALES = "_blocks", "_scales"
T = TypeVar("T")


def pairs(stored: dict[str, T]) -> dict[str, tuple[T, T]]:
    """Return the blocks and scales among `stored`, by the name of the tensor that they are."""
    names = [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]
    return {
        name: (stored[name + BLOCKS], stored[name + SCALES])
        for name in names
        if name + SCALES in stored
    }


def shape_of(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor that blocks and scales of these shapes are, () for none."""
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != 16:
        return ()
    return blocks[0], blocks[2] * 32, blocks[1]


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return (experts, columns, rows) in bf16."""
    table = torch.tensor([*VALUES, *(-x for x in VALUES)])
    result = torch.empty(shape_of(blocks.shape, scales.shape), dtype=torch.bfloat16)
    # One expert at a time: as indices its values take 16 times the memory
    for expert, bits, powers in zip(result, blocks, scales, strict=True):
        values = table[torch.stack((bits & 15, bits >> 4), dim=-1).int()].flatten(-2)
        expert.copy_((values * torch.exp2(powers[..., None].float() - 127)).flatten(1).t())
    return result
