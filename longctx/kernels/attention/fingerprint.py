"""What identifies kernels: hashes of sources and results, versions of all that compiles them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longctx.kernels import HAS_TRITON
from longctx.kernels.attention import IMPLEMENTATIONS

DRIVER = Path("/proc/driver/nvidia/version")


def sources(implementation: str) -> dict[str, str]:
    """Return sha256 of each source file of `implementation`; {} if it is not ours."""
    folder = Path(__file__).parent
    ours = IMPLEMENTATIONS.get(implementation)
    patterns = ours.files if ours else ()
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def sha256(x: Tensor) -> str:
    """Return sha256 of a tensor's values, in order."""
    values = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def integers(shape: Sequence[int], seed: int, below: int) -> Tensor:
    """Return integers 0 .. below-1 as fp32, the same on every machine and with every torch."""
    # torch.randint does not promise that
    x = (torch.arange(math.prod(shape)) + seed * 0x9E3779B1) & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) % below).float().view(*shape)


def machine(device: torch.device) -> dict[str, str]:
    """Return the names and versions of everything that compiles and runs kernels on `device`."""
    versions = {"torch": torch.__version__, "device": gpu_name(device)}
    if device.type == "cpu":
        return versions
    versions |= {name.lower(): version for name, version in compilers().items()}
    driver = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text() if DRIVER.is_file() else "")
    versions["driver"] = driver[0] if driver else "unknown"
    return versions | {"cuda": str(torch.version.cuda or torch.version.hip)}


def gpu_name(device: torch.device) -> str:
    """Return the name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compilers() -> dict[str, str]:
    """Return the version of Triton, which brings a ptxas, and the path of another ptxas."""
    versions = {"Triton": importlib.metadata.version("triton") if HAS_TRITON else "none"}
    other = os.environ.get("TRITON_PTXAS_PATH")
    return versions | ({"ptxas": other} if other else {})
