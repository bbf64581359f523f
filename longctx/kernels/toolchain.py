"""The machine and the tools that compile and run kernels: GPU, driver, torch, Triton, ptxas."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def machine(device: torch.device) -> dict[str, str]:
    """Return the names and versions of everything that compiles and runs kernels on `device`."""
    versions = {"torch": torch.__version__, "device": gpu_name(device)}
    if device.type == "cpu":
        return versions
    versions |= {name.lower(): version for name, version in compilers().items()}
    return versions | {"driver": driver(), "cuda": str(torch.version.cuda or torch.version.hip)}


def gpu_name(device: torch.device) -> str:
    """Return the name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compilers() -> dict[str, str]:
    """Return the versions of Triton and of the ptxas that it calls."""
    try:
        versions = {"Triton": importlib.metadata.version("triton")}
    except importlib.metadata.PackageNotFoundError:
        return {"Triton": "none"}
    if torch.version.cuda is not None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        versions["ptxas"] = ptxas(10 * major + minor)
    return versions


def ptxas(arch: int) -> str:
    """Return the version of the ptxas that Triton calls for sm_`arch`, such as 12.8.93."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    text = get_ptxas_version(arch)
    match = re.search(r"\bV(\d[\d.]*)", text)
    return match[1] if match else text.strip()


def driver() -> str:
    """Return the version of the NVIDIA driver; "unknown" if the kernel does not say."""
    text = DRIVER.read_text() if DRIVER.is_file() else ""
    match = re.search(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else "unknown"
