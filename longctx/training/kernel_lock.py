"""The kernel lock of a run: what computes its attention, found out before the first step and held
on resume.

It stands in kernel.lock.json, in every checkpoint and in wandb's configuration. A resumed run
compares with its checkpoint, whose weights those kernels made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx import files
from longctx.attention import Mask, attention, kernels_run, reproducible
from longctx.config.train_config import CompleteConfig, KernelConfig
from longctx.kernels import fingerprint as kernels
from longctx.kernels import launch
from longctx.kernels.fingerprint import Lock
from longctx.kernels.selftest import SelfTestFailed

FILE = "kernel.lock.json"
PACKAGES = {
    "flash_attn": ("flash-attn-4", "flash-attn-3", "flash-attn")
}  # backend → where its kernels come from


def of_run(config: CompleteConfig, device_type: str) -> Lock | None:
    """The lock of the attention that `config` asks for; None with kernel.lock=off.

    Runs it once, forward and backward, on a small input of its own, which compiles what the run
    needs anyway. Raises ValueError, one line, where the kernels fail their self-test.
    """
    if config.kernel.lock == "off":
        return None
    device = (
        torch.device(device_type, torch.cuda.current_device())
        if device_type == "cuda"
        else torch.device("cpu")
    )
    backend, model = config.attention.backend, config.model
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    promised, printed = reproducible(backend), {}
    group = model.heads // model.kv_heads

    def run(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor) -> tuple[Tensor, Sequence[str]]:
        out = attention(
            q, k, v, mask=Mask.documents(doc_ids), backend=backend, **config.attention.options
        )
        return out, promised.get(kernels_run()[backend], ())

    if promised:
        start = 0
        if (
            backend == "flash" and device.type == "cuda"
        ):  # whose compiled kernels depend on the length of the rows
            like = torch.empty(0, 0, 0, model.head_size, dtype=dtype, device=device)
            start = max(
                launch.bucket(name, like, config.seq_len) for name in ("forward", "dkv", "dq")
            )
        try:
            printed = kernels.fingerprint(run, device, dtype, model.head_size, group, start)
        except SelfTestFailed as error:
            raise ValueError(str(error)) from error
    ran = (
        kernels_run().get(backend, "unknown before it runs")
        if promised
        else "unknown before it runs"
    )
    found: Lock = {"format": kernels.FORMAT, "backend": backend, "kernel": ran}
    found |= {"machine": kernels.machine(device) | _packages(backend), "fingerprint": printed}
    if missing := [name for name in ("out", "dq", "dk", "dv") if name not in printed]:
        found["not_reproducible"] = missing
    if sources := kernels.sources(ran):
        found |= {"sources": sources, "compiled": kernels.compiled(sources)}
    if os.environ.get("TRITON_INTERPRET") == "1":
        found["interpreter"] = True
    return found


def _packages(backend: str) -> dict[str, str]:
    found = {}
    for name in PACKAGES.get(backend, ()):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if backend == "sdpa" and torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def held(
    config: CompleteConfig, new: Lock | None, old: Any, steps: int
) -> tuple[Lock | None, str | None]:
    """The lock that a run resumed after `steps` steps goes on with, and a line to say about it.

    `old` is the checkpoint's, None if it has none. Raises ValueError, one line with every field
    that differs, unless kernel.lock=record accepts that.
    """
    if new is None:
        return None, None
    if not isinstance(old, dict):
        if config.kernel.lock == "strict":
            raise ValueError(
                f"kernel.lock=strict: {config.resume} has no kernel lock to hold; kernel.lock=record makes one"
            )
        return new, "recorded now: the run had no kernel lock before"
    new = new | ({"earlier": old["earlier"]} if old.get("earlier") else {})
    found = kernels.differences(old, new)
    if not found:
        return new, None
    said = "; ".join(f"{field}: {_short(was)} -> {_short(now)}" for field, was, now in found)
    if config.kernel.lock != "record":
        raise ValueError(
            f"resume={config.resume}: the attention kernels are not those that the run began with, so it would not go on as it "
            f"was ({said}); go back to those, or accept the new ones with kernel.lock=record"
        )
    past = {key: value for key, value in old.items() if key != "earlier"} | {"until_step": steps}
    return new | {
        "earlier": [*old.get("earlier", []), past]
    }, f"accepted others from step {steps + 1:,} on: {said}"


def _short(text: str) -> str:
    """A hash by its beginning."""
    words = text.split(" ")
    return " ".join(word[:12] if len(word) == 64 and "=" not in word else word for word in words)


def lasting(config: CompleteConfig) -> CompleteConfig:
    """`config` as config.yaml keeps it: new kernels are accepted once, not for ever."""
    return replace(config, kernel=KernelConfig()) if config.kernel.lock == "record" else config


def write(folder: Path, lock: Lock | None) -> None:
    """Write kernel.lock.json in the folder of a run, or take it away."""
    if lock is None:
        (folder / FILE).unlink(missing_ok=True)
    else:
        files.write_text(folder / FILE, json.dumps(lock, indent=1) + "\n")


def read(folder: Path) -> Lock | None:
    """What kernel.lock.json says; None where there is none."""
    try:
        found: Lock = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        return None
    return found
