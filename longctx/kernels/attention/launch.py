"""Launch configs: tile sizes, warps and stages per kernel and head size, from a table.

Nothing is timed at run time.

launch.json maps architecture → kernel → head size (padded to a power of two) → shortest length →
[BM, BN, warps, stages]. "any" fits every chip with 99 KiB of shared memory, and serves the sizes
that another part lacks; "any-fp32" is for 32-bit inputs. Measurements of `python -m benchmarks
tune` on this very model of GPU go before it, for 16-bit inputs: the file that LONGCTX_LAUNCH names
(empty: none), else ~/.config/longctx/launch.json, in the same form with the GPU's name for the
architecture. It may configure the Hopper kernels too.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

# kernel of the portable implementation, module of Hopper's → the pass that it serves
PORTABLE = {"forward": "forward", "dkv": "backward", "dq": "backward"}
HOPPER = {"hopper_forward": "forward", "hopper_backward": "backward"}
DOCUMENT_TILE = 128  # queries of a tile that begins with a document, or behind another
ZEROS = 1 << 16  # int32 numbers of a stream that are zeroed at a time
Table = dict[str, dict[str, dict[str, list[Any]]]]  # kernel → head size → shortest length → config


class Launch(NamedTuple):
    """BM queries × BN keys of a tile, warps of a program, stages of its software pipeline."""

    BM: int
    BN: int
    warps: int
    stages: int


# kernel → its config that `tune` measures at the moment; nothing else sets it
on_trial: dict[str, Launch] = {}


def launch_config(kernel: str, q: Tensor, length: int) -> Launch:
    """Return the config of `kernel` ("forward", "dkv", "dq") for q (B, T, H, D), `length` keys."""
    if on_trial and kernel in on_trial:
        return on_trial[kernel]
    rows = rows_of(kernel, q)
    return Launch(*rows[str(_start(rows, length))])


def longest_bucket(kernels: Iterable[str], q: Tensor, length: int) -> int:
    """Return the shortest length with the configs of `length` keys in all `kernels`."""
    return max(_start(rows_of(name, q), length) for name in kernels)


def rows_of(kernel: str, q: Tensor) -> dict[str, list[Any]]:
    """Return the configs of `kernel` for q's type, head size and device, by shortest length."""
    # measurements on this GPU come before the shipped table
    size = padded(q.shape[3])
    if q.element_size() == 2 and q.is_cuda:
        rows: dict[str, list[Any]] | None = measured(_name(q.device)).get(kernel, {}).get(size)
        if rows is not None:
            return rows
    shipped = table()
    own = shipped[architecture(q.device, q.element_size())][kernel]
    return own.get(size) or shipped["any"][kernel][size]


@functools.cache
def architecture(device: torch.device, itemsize: int) -> str:
    """Return the part of the shipped table that serves `device`."""
    if itemsize == 4:
        return "any-fp32"
    if device.type != "cuda" or torch.version.hip is not None:
        return "any"
    capability = torch.cuda.get_device_capability(device)
    return "sm90" if capability[0] == 9 else "sm80" if capability == (8, 0) else "any"


@functools.cache
def table() -> dict[str, Table]:
    """Read launch.json, once."""
    return dict(json.loads(Path(__file__).with_name("launch.json").read_text()))


def measured_file() -> Path | None:
    """Return the path of measured tables; None if LONGCTX_LAUNCH is set and empty."""
    name = os.environ.get("LONGCTX_LAUNCH", "~/.config/longctx/launch.json")
    return Path(name).expanduser() if name else None


@functools.cache
def measured(gpu: str) -> Table:
    """Return the table measured on GPUs named `gpu`, by kernel."""
    path = measured_file()
    # only the one of the environment must be there
    if path is None or not (path.exists() or os.environ.get("LONGCTX_LAUNCH")):
        return {}
    kernels: Table = json.loads(path.read_text()).get(gpu, {})
    return {kernel: sizes for kernel, sizes in kernels.items() if kernel != "measured"}


@functools.cache
def configure(module: ModuleType, kernel: str, device: torch.device) -> None:
    """Put the configs measured for `kernel` on `device` into the module's CONFIGS."""
    configs = getattr(module, "CONFIGS", {})
    for size, rows in measured(_name(device)).get(kernel, {}).items():
        configs[int(size)] = type(configs[int(size)])(*rows["0"])


def tile_starts(first: Tensor) -> Tensor:
    """Return (B, T + 1) int32: the first query of each tile, if tiles begin with each document,
    then T; last the most tiles of a row. `first` (B, T) is that of each token's document.
    """
    i = torch.arange(first.shape[1], device=first.device)
    begins = (i - first) % DOCUMENT_TILE == 0
    starts = torch.where(begins, i, len(i)).sort(1).values
    most = begins.sum(1).max() if begins.numel() else begins.sum()
    return torch.cat([starts, most.expand(len(first), 1)], 1).int()


def padded(head_dim: int) -> str:
    """Return the key of a table that serves heads of `head_dim` channels."""
    return str(max(16, 1 << (head_dim - 1).bit_length()))


def _start(rows: dict[str, list[Any]], length: int) -> int:
    return max(start for start in map(int, rows) if start <= length)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a GPU; a CPU, which interprets the kernels, has four."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_unused: dict[tuple[torch.device, int], tuple[Tensor | None, int]] = {}  # and the first of them
_lock = threading.Lock()


def unused_zeros(device: torch.device, stream: int) -> tuple[Tensor, int]:
    """Return int32 zeros, and the index of 16 bytes in them that no launch has been given."""
    if stream:  # perhaps a graph's, or of its first run: it must zero its own, in its own memory
        return torch.zeros(4, dtype=torch.int32, device=device), 0
    with _lock:
        zeros, start = _unused.get((device, stream), (None, 0))
        if zeros is None or start == len(zeros):
            zeros, start = torch.zeros(ZEROS, dtype=torch.int32, device=device), 0
        _unused[device, stream] = zeros, start + 4
    return zeros, start


@functools.cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
