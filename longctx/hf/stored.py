"""Tensors of safetensors files, one file or the shards that an index names, from their headers.

Nothing in a folder is run: JSON and safetensors only.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longctx import untrusted

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# MXFP4: values of four bits with a power of two for every 32, as gpt-oss's folders have experts.
# NAME_blocks (experts, rows, columns / 32, 16) has two values in a byte, the low bits first, and
# NAME_scales (experts, rows, columns / 32) a byte s for the factor 2^(s - 127) of 32 values (OCP
# Microscaling Formats 1.0). They are read as the tensor NAME (experts, columns, rows) in bf16,
# which holds every such value exactly.
BLOCKS, SCALES = "_blocks", "_scales"
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of bits 000 to 111; then negative


class Stored(NamedTuple):
    """The position of a tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    name: str  # there
    scales: Any = None  # the Stored of its factors, if it is in MXFP4


def values_of(stored: Stored) -> Tensor:
    """Return the tensor that is stored there."""
    # opened for each tensor: the pages of a file count as ours for as long as it is mapped
    with safe_open(stored.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(stored.name)
    return tensor if stored.scales is None else dequantized(tensor, values_of(stored.scales))


def shape_of_mxfp4(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor that blocks and scales of these shapes are, () for none."""
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != 16:
        return ()
    return blocks[0], blocks[2] * 32, blocks[1]


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return (experts, columns, rows) in bf16, of MXFP4."""
    table = torch.tensor([*MXFP4, *(-x for x in MXFP4)])
    result = torch.empty(shape_of_mxfp4(blocks.shape, scales.shape), dtype=torch.bfloat16)
    # One expert at a time: as indices its values take 16 times the memory
    for expert, bits, powers in zip(result, blocks, scales, strict=True):
        values = table[torch.stack((bits & 15, bits >> 4), dim=-1).int()].flatten(-2)
        expert.copy_((values * torch.exp2(powers[..., None].float() - 127)).flatten(1).t())
    return result


def inventory(folder: Path) -> dict[str, Stored]:
    """Return every tensor in the safetensors of `folder`, from their headers."""
    stored: dict[str, Stored] = {}
    for name in [SINGLE] if os.path.lexists(folder / SINGLE) else shards_of(folder):
        header = _header(folder / name)
        for twice in sorted(stored.keys() & header.keys()):
            problem = f"{twice} is in {stored[twice].file.name}, too; a tensor belongs in one file"
            raise ValueError(f"{folder / name}: {problem}")
        stored |= header
    for name in [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]:
        if name + SCALES in stored:
            blocks, scales = stored.pop(name + BLOCKS), stored.pop(name + SCALES)
            is_bytes = blocks.dtype == scales.dtype == "U8"
            dtype = "BF16" if is_bytes else "MXFP4 that is not in bytes"
            shape = shape_of_mxfp4(blocks.shape, scales.shape)
            stored[name] = blocks._replace(shape=shape, dtype=dtype, scales=scales)
    return stored


def shards_of(folder: Path) -> list[str]:
    """Return the safetensors that an index names, beside it; without an index one file."""
    index = folder / INDEX
    if not os.path.lexists(index):
        return [SINGLE]
    placed = untrusted.read_settings(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index}: no weight_map that says which file has which tensor")
    for name in placed.values():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*\.safetensors", name):
            raise ValueError(f"{index}: {name!r} is not the name of a safetensors file beside it")
    return sorted(set(placed.values()))


def _header(file: Path) -> dict[str, Stored]:
    try:
        untrusted.open_file(file, within=file.parent).close()
        # safetensors itself reads a header of at most 100 MB
        with safe_open(file, framework="pt") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118
            return {n: Stored(file, tuple(x.get_shape()), x.get_dtype(), n) for n, x in slices}
    except FileNotFoundError:
        remedy = "pickles (*.bin) are not read, since they can run code: save it as safetensors"
        raise FileNotFoundError(f"{file}: no such file; {remedy}, with its index if any") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as the JSON files of a Hugging Face folder are written."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def warn_of_not_finite(name: str | None) -> None:
    """Print a warning that the tensor `name`, if any, is written with NaN or infinity in it."""
    if name is not None:
        why = "the weights are damaged, or with dtype=fp16 larger than the 65,504 that it holds"
        print(f"warning: {name} has numbers that are not finite: {why}", file=sys.stderr)
