"""Identify kernels by their sources and by their results.

A fingerprint is sha256 of the results for fixed inputs, bit for bit. Together with versions and a
hash of the sources it makes the kernel lock of a run, see longctx/training/kernel_lock.py.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import re
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from longctx.kernels.attention import IMPLEMENTATIONS

DRIVER = Path("/proc/driver/nvidia/version")
TOKENS = 1000  # of the inputs
DOCUMENTS = (97, 1, 200, 35, 667)  # their lengths, again and again


def sources(implementation: str) -> dict[str, str]:
    """Return sha256 of each source file of `implementation`; {} if it is not ours."""
    folder = Path(__file__).parent
    ours = IMPLEMENTATIONS.get(implementation)
    patterns = ours.files if ours else ()
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fingerprint(
    run: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Sequence[str]]],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    bucket: int = 0,
) -> dict[str, str]:
    """Return sha256 of the results of run(q, k, v, doc_ids) → out, names on fixed inputs.

    q is (1, T, group, head_dim), k and v (1, T, 1, head_dim), doc_ids (1, T), T = `bucket` +
    TOKENS. Of out, dq, dk, dv only the `names` are hashed: the others may change from run to run.
    """
    length = bucket + TOKENS
    # one sequence, one key-value head: they choose the kernel as a run does
    shapes = [(1, length, heads, head_dim) for heads in (group, 1, 1, group)]
    # The same values on every device; made on the GPU, since long sequences need millions of them
    with torch.device(device):
        q, k, v, do = (
            ((integers(shape, n + 50, 256) - 127.5) / 64).to(dtype)
            for n, shape in enumerate(shapes)
        )
    with torch.device("cpu"):  # whatever the default device is
        documents = enumerate(cycle(DOCUMENTS))
        ids: list[int] = []
        while len(ids) < length:
            number, tokens = next(documents)
            ids += [number] * tokens
        doc_ids = torch.tensor(ids[:length])[None]

    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out, names = run(q, k, v, doc_ids)
    # gradients only if some of them have the same bits every time
    results = {"out": out}
    if set(names) - {"out"}:
        gradients = torch.autograd.grad(out, (q, k, v), do)
        results |= zip(("dq", "dk", "dv"), gradients, strict=True)
    dtype_name = str(dtype).removeprefix("torch.")
    inputs = f"{dtype_name}, {length} tokens in documents, {group} heads on 1, size {head_dim}"
    return {"inputs": inputs} | {name: sha256(results[name]) for name in names}


def sha256(x: Tensor) -> str:
    """Return sha256 of a tensor's values, in order."""
    values = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def integers(shape: Sequence[int], seed: int, below: int) -> Tensor:
    """Return integers 0 .. below-1 as fp32, the same on every machine and with every torch.

    torch.randint does not promise that.
    """
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
