"""The kernel lock of a run: which kernels ran, so that a later run knows whether they are the same.

A lock is a dictionary of plain values: sha256 of the sources, sha256 of the machine code of every
kernel that was compiled in this process, with its constants, versions of all compilers, driver and
GPU, and a fingerprint: sha256 of the results for fixed inputs, bit for bit.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.selftest import integers
from longctx.kernels.toolchain import machine as machine

FORMAT = 1
HOPPER = ("hopper_*.py", "gluon.py", "portable.py", "tile_schedule.py")
SOURCES = {
    "triton-portable": ("portable.py", "tile_schedule.py"),
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


def compiled(files: Iterable[str]) -> dict[str, list[str]]:
    """Kernels of these files that were compiled in this process.

    Name with constants → sha256 of the machine code.
    """
    codes: dict[str, set[str]] = {}
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
                binary = kernel.asm.get("cubin") or kernel.asm.get("hsaco") or b""
                codes.setdefault(_described(kernel), set()).add(machine_code(binary))
    return {name: sorted(codes[name]) for name in sorted(codes)}


def _described(kernel: Any) -> str:
    """A compiled kernel's name and constants: portable.forward_kernel BM=64 BN=64 D=128 ..."""
    module = kernel.src.fn.__module__.rpartition(".")[2]
    names, constants = kernel.src.fn.arg_names, {}
    for key, value in kernel.src.constants.items():
        place = key[0] if isinstance(key, tuple) else key
        name = names[place] if isinstance(place, int) else place
        if name.isupper():
            constants[name] = value
    stages = getattr(kernel.metadata, "num_stages", 0)
    options = [("warps", kernel.metadata.num_warps), ("stages", stages)]
    texts = [f"{name}={value}" for name, value in sorted(constants.items()) + options]
    return " ".join([f"{module}.{kernel.src.fn.__name__}", *texts])


def machine_code(binary: bytes) -> str:
    """sha256 of an ELF file's code and constants, not of its line table, which names folders."""
    digest = hashlib.sha256()
    if binary[:5] != b"\x7fELF\x02":
        return hashlib.sha256(binary).hexdigest()
    start = struct.unpack_from("<Q", binary, 0x28)[0]
    size, count, names_at = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, start + n * size) for n in range(count)]
    names = headers[names_at][4]
    for header in headers:
        name = binary[names + header[0] : binary.index(b"\0", names + header[0])]
        code = name.startswith((b".text", b".nv.constant", b".rodata"))
        if code and header[1] != 8:  # 8: SHT_NOBITS, which takes no bytes
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
    """sha256 of the results of run(q, k, v, doc_ids) → out, names, on inputs that never change.

    q is (1, T, group, head_dim), k and v (1, T, 1, head_dim), doc_ids (1, T), T = `bucket` +
    TOKENS. Of out, dq, dk, dv only the `names` are hashed: the bits of others may differ from run
    to run.
    """
    T = bucket + TOKENS
    shapes = [(1, T, heads, head_dim) for heads in (group, 1, 1, group)]
    with torch.device(device):  # the same values on each, and of long rows there are millions
        q, k, v, do = (
            ((integers(shape, n + 50, 256) - 127.5) / 64).to(dtype)
            for n, shape in enumerate(shapes)
        )
    with torch.device("cpu"):  # whatever the default device is
        lengths = zip(range(T), cycle(DOCUMENTS), strict=False)
        ids = torch.tensor([n for n, length in lengths for _ in range(length)])[:T]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out, names = run(q, k, v, ids[None])
    results = {"out": out}
    if set(names) - {"out"}:
        gradients = torch.autograd.grad(out, (q, k, v), do)
        results |= zip(("dq", "dk", "dv"), gradients, strict=True)
    name_of_type = str(dtype).removeprefix("torch.")
    inputs = f"{name_of_type}, {T} tokens in documents, {group} heads on 1, size {head_dim}"
    return {"inputs": inputs} | {name: sha256(results[name]) for name in names}


def sha256(x: Tensor) -> str:
    """sha256 of a tensor's values, in order."""
    data = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def differences(old: Lock, new: Lock) -> list[tuple[str, str, str]]:
    """(field, before, now) of every field that changed.

    It is no difference that more kernels have been compiled by now.
    """
    before, now = _flat(old), _flat(new)
    changed = []
    for field in dict.fromkeys([*before, *now]):
        was, is_ = before.get(field, "none"), now.get(field, "none")
        if was != is_ and not (field.startswith("compiled.") and was == "none"):
            changed.append((field, was, is_))
    return changed


def _flat(lock: Lock, prefix: str = "") -> dict[str, str]:
    """Dotted field → text; the items of a list are joined, so that their order counts.

    `earlier`, which holds the locks of a run before it was resumed, is left out.
    """
    fields: dict[str, str] = {}
    for key, value in lock.items():
        if isinstance(value, dict):
            fields |= _flat(value, f"{prefix}{key}.")
        elif key != "earlier":
            values = value if isinstance(value, list) else [value]
            fields[prefix + key] = " ".join(map(str, values))
    return fields
