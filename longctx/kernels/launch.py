"""The table of launch configs: tile sizes, warps and stages per kernel and head size. Nothing is timed at run time.

launch.json maps architecture → kernel → head size (padded to a power of two) → shortest length → [BM, BN, warps, stages]. "any"
fits every chip with 99 KiB of shared memory; "any-fp32" is for 32-bit inputs.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Launch(NamedTuple):
    """BM queries × BN keys of a tile, warps of a program, stages of its software pipeline."""

    BM: int
    BN: int
    warps: int
    stages: int


def launch_config(kernel: str, q: Tensor, length: int) -> Launch:
    """The config of `kernel` ("forward", "dkv" or "dq") for tensors like q (B, T, H, D) and `length` keys."""
    return table_entry(architecture(q.device, q.element_size()), kernel, q.shape[3], length)


@functools.cache
def architecture(device: torch.device, itemsize: int) -> str:
    """The part of the table that serves `device`."""
    if itemsize == 4:
        return "any-fp32"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9:
        return "sm90"
    return "any"


def table_entry(arch: str, kernel: str, head_dim: int, length: int) -> Launch:
    """The table's row for a head size from 1 to 256 and a length from 1 up."""
    buckets = table()[arch][kernel][str(max(16, 1 << (head_dim - 1).bit_length()))]
    return Launch(*buckets[str(max(int(start) for start in buckets if int(start) <= length))])


@functools.cache
def table() -> dict[str, dict[str, dict[str, dict[str, list[int]]]]]:
    """launch.json, read once."""
    return json.loads(Path(__file__).with_name("launch.json").read_text())
