"""Identify kernels by what they are made of and by what they compute.

A fingerprint is sha256 of the results for fixed inputs, bit for bit. Together with versions and a
hash of the sources it makes the kernel lock of a run, see longctx/training/kernel_lock.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from longctx.kernels.selftest import integers

HOPPER = ("hopper_*.py", "gluon.py", "portable.py", "tile_schedule.py")
SOURCES = {
    "triton-portable": ("portable.py", "tile_schedule.py"),
    "triton-hopper": HOPPER,
    "triton-hopper-ordered": HOPPER,
    "torch-tiled": ("tiled.py",),
}
TOKENS = 1000  # of the inputs
DOCUMENTS = (97, 1, 200, 35, 667)  # their lengths, again and again


def sources(implementation: str) -> dict[str, str]:
    """Return sha256 of each source file of `implementation`; {} if it is not ours."""
    folder = Path(__file__).parent
    patterns = SOURCES.get(implementation, ())
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
