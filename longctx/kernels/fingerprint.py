"""What ran, written down: the kernels of a run, so that whoever resumes or compares it knows
whether they are still the same.

A lock is a dictionary of plain values: sources by sha256, what was compiled in this process with
its constants and the sha256 of its machine code, versions of all compilers, driver and GPU, and a
fingerprint: sha256 of what comes out for fixed inputs, bit for bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import re
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.selftest import whole

FORMAT = 1
HOPPER = ("hopper_*.py", "gluon.py", "portable.py", "walk.py")
SOURCES = {
    "triton-portable": ("portable.py", "walk.py"),
    "triton-hopper": HOPPER,
    "triton-hopper-ordered": HOPPER,
    "torch-tiled": ("tiled.py",),
}
TOKENS = 1000  # of the fingerprint
DOCUMENTS = (97, 1, 200, 35, 667)  # their lengths, again and again
Lock = dict[str, Any]


def sources(implementation: str) -> dict[str, str]:
    """sha256 of each file that `implementation` is made of; empty where it is not ours."""
    folder = Path(__file__).parent
    files = sorted(
        path for pattern in SOURCES.get(implementation, ()) for path in folder.glob(pattern)
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def machine(device: torch.device) -> dict[str, str]:
    """What compiles and runs kernels on `device`."""
    found = {"torch": torch.__version__, "device": gpu_name(device)}
    if device.type == "cpu":
        return found
    tools = {name.lower(): version for name, version in compilers().items()}
    return (
        found | tools | {"driver": driver(), "cuda": str(torch.version.cuda or torch.version.hip)}
    )


def gpu_name(device: torch.device) -> str:
    """The name of a GPU, or what else the device is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compilers() -> dict[str, str]:
    """Versions of Triton and of the ptxas that it calls."""
    try:
        found = {"Triton": importlib.metadata.version("triton")}
    except importlib.metadata.PackageNotFoundError:
        return {"Triton": "none"}
    if torch.version.cuda is not None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found["ptxas"] = ptxas(10 * major + minor)
    return found


def ptxas(arch: int) -> str:
    """The version of the ptxas that Triton calls for sm_`arch`, such as 12.8.93."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    said = get_ptxas_version(arch)
    match = re.search(r"\bV(\d[\d.]*)", said)
    return match[1] if match else said.strip()


def driver() -> str:
    """The version of the NVIDIA driver; "unknown" where nothing tells."""
    try:
        said = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        said = ""
    if match := re.search(r"\d+\.\d+(\.\d+)?", said):
        return match[0]
    try:
        library, text = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.create_string_buffer(96)
        library.nvmlInit_v2()
        known = library.nvmlSystemGetDriverVersion(text, 96) == 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return "unknown"
    return text.value.decode() if known else "unknown"


def compiled(files: Iterable[str]) -> dict[str, list[str]]:
    """What the kernels in these files of ours were compiled to in this process: name with constants
    → sha256 of the machine code.
    """
    found: dict[str, set[str]] = {}
    names = [f"longctx.kernels.{file.removesuffix('.py')}" for file in files]
    modules = [sys.modules[name] for name in names if name in sys.modules]
    functions = {
        id(x): x
        for module in modules
        for x in list(vars(module).values())
        if hasattr(x, "device_caches")
    }
    for function in functions.values():
        for cache in list(function.device_caches.values()):
            for kernel in list(cache[0].values()):
                binary = next(
                    (kernel.asm[kind] for kind in ("cubin", "hsaco") if kind in kernel.asm), b""
                )
                found.setdefault(_described(kernel), set()).add(machine_code(binary))
    return {name: sorted(found[name]) for name in sorted(found)}


def _described(kernel: Any) -> str:
    """A compiled kernel's name and constants: portable.forward_kernel BM=64 BN=64 D=128 ..."""
    module = kernel.src.fn.__module__.rpartition(".")[2]
    names, constants = kernel.src.fn.arg_names, {}
    for path, value in kernel.src.constants.items():
        name = (
            names[path[0]]
            if isinstance(path, tuple)
            else names[path]
            if isinstance(path, int)
            else path
        )
        if name.isupper():
            constants[name] = value
    options = {
        "warps": kernel.metadata.num_warps,
        "stages": getattr(kernel.metadata, "num_stages", 0),
    }
    return " ".join(
        [
            f"{module}.{kernel.src.fn.__name__}",
            *(f"{k}={v}" for k, v in sorted(constants.items()) + list(options.items())),
        ]
    )


def machine_code(binary: bytes) -> str:
    """sha256 of the code and constants in an ELF file: not of its line table, which names folders."""
    digest = hashlib.sha256()
    if binary[:5] != b"\x7fELF\x02":
        return hashlib.sha256(binary).hexdigest()
    start = struct.unpack_from("<Q", binary, 0x28)[0]
    size, count, names_at = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, start + n * size) for n in range(count)]
    names = headers[names_at][4]
    for header in headers:
        name = binary[names + header[0] : binary.index(b"\0", names + header[0])]
        if (
            name.startswith((b".text", b".nv.constant", b".rodata")) and header[1] != 8
        ):  # 8: takes no bytes
            digest.update(name + b"\0" + binary[header[4] : header[4] + header[5]])
    return digest.hexdigest()


def fingerprint(
    run: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Sequence[str]]],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    bucket: int = 0,
) -> dict[str, str]:
    """sha256 of what comes out of run(q, k, v, doc_ids) → out, names; on inputs that are the same
    everywhere.

    q is (1, T, group, head_dim), k and v (1, T, 1, head_dim), doc_ids (1, T), T = `bucket` +
    TOKENS. Of out, dq, dk, dv those are hashed that run names, for others may differ from time to
    time.
    """
    T = bucket + TOKENS
    shapes = [(1, T, heads, head_dim) for heads in (group, 1, 1, group)]
    with torch.device("cpu"):  # whatever the default device is
        given = [
            ((whole(shape, n + 50, 256) - 127.5) / 64).to(device, dtype)
            for n, shape in enumerate(shapes)
        ]
        ids = torch.tensor(
            [n for n, size in zip(range(T), cycle(DOCUMENTS), strict=False) for _ in range(size)]
        )[:T]
    q, k, v = (x.requires_grad_() for x in given[:3])
    with torch.enable_grad():
        out, names = run(q, k, v, ids[None])
    results = {"out": out}
    if set(names) - {"out"}:
        results |= zip(
            ("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), given[3]), strict=True
        )
    said = f"{str(dtype).removeprefix('torch.')}, {T} tokens in documents, {group} heads on 1, size {head_dim}"
    return {"inputs": said} | {name: sha256(results[name]) for name in names}


def sha256(x: Tensor) -> str:
    """Of a tensor's values, in order."""
    data = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def differences(old: Lock, new: Lock) -> list[tuple[str, str, str]]:
    """(field, before, now) for whatever is not the same; that more kernels were compiled by now is
    no difference.
    """
    before, now = _flat(old), _flat(new)
    found = []
    for field in dict.fromkeys([*before, *now]):
        was, is_ = before.get(field, "none"), now.get(field, "none")
        if was != is_ and not (field.startswith("compiled.") and was == "none"):
            found.append((field, was, is_))
    return found


def _flat(lock: Lock, prefix: str = "") -> dict[str, str]:
    """Dotted field → text; a list is its text, so that order counts. What a run did `earlier` is
    left out.
    """
    found: dict[str, str] = {}
    for key, value in lock.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif key != "earlier":
            found[prefix + key] = (
                " ".join(map(str, value)) if isinstance(value, list) else str(value)
            )
    return found
