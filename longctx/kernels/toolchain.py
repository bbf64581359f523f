"""The machine and the tools that compile and run kernels: GPU, driver, torch, Triton, ptxas."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from pathlib import Path

import torch


def machine(device: torch.device) -> dict[str, str]:
    """What compiles and runs kernels on `device`."""
    versions = {"torch": torch.__version__, "device": gpu_name(device)}
    if device.type == "cpu":
        return versions
    versions |= {name.lower(): version for name, version in compilers().items()}
    return versions | {"driver": driver(), "cuda": str(torch.version.cuda or torch.version.hip)}


def gpu_name(device: torch.device) -> str:
    """The name of a GPU, or what else the device is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compilers() -> dict[str, str]:
    """Versions of Triton and of the ptxas that it calls."""
    try:
        versions = {"Triton": importlib.metadata.version("triton")}
    except importlib.metadata.PackageNotFoundError:
        return {"Triton": "none"}
    if torch.version.cuda is not None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        versions["ptxas"] = ptxas(10 * major + minor)
    return versions


def ptxas(arch: int) -> str:
    """The version of the ptxas that Triton calls for sm_`arch`, such as 12.8.93."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    text = get_ptxas_version(arch)
    match = re.search(r"\bV(\d[\d.]*)", text)
    return match[1] if match else text.strip()


def driver() -> str:
    """The version of the NVIDIA driver; "unknown" where nothing tells."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    if match := re.search(r"\d+\.\d+(\.\d+)?", text):
        return match[0]
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        buffer = ctypes.create_string_buffer(96)
        library.nvmlInit_v2()
        known = library.nvmlSystemGetDriverVersion(buffer, 96) == 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return "unknown"
    return buffer.value.decode() if known else "unknown"
