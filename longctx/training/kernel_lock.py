"""The kernel lock of a run: what computes its attention, found out before the first step and held
on resume.

It stands in kernel.lock.json, in every checkpoint and in wandb's configuration. A resumed run
compares with its checkpoint, whose weights those kernels made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx import files
from longctx.attention import Mask, attention, kernels_run, reproducible
from longctx.config.train_config import TrainConfig
from longctx.distributed.devices import dtype_of
from longctx.kernels import fingerprint, launch
from longctx.kernels.fingerprint import Lock
from longctx.kernels.selftest import SelfTestFailed
from longctx.planner.workload import Workload
from longctx.runs import run_folder

FILE = "kernel.lock.json"
# Backend → the packages that its kernels come from.
PACKAGES = {"flash_attn": ("flash-attn-4", "flash-attn-3", "flash-attn")}


def of_workload(workload: Workload) -> Lock:
    """The lock of the attention that `workload` uses.

    Runs it once, forward and backward, on a small input of its own, which compiles what the run
    needs anyway. Raises ValueError, one line, where the kernels fail their self-test.
    """
    backend, model = workload.attention.backend, workload.model
    options = workload.attention.options
    device = torch.device(workload.device)
    if workload.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    dtype = dtype_of(workload.precision)
    promised = reproducible(backend)

    def run(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor) -> tuple[Tensor, Sequence[str]]:
        out = attention(q, k, v, mask=Mask.documents(doc_ids), backend=backend, **options)
        return out, promised.get(kernels_run()[backend], ())

    hashes, kernel = {}, "unknown before it runs"
    if promised:
        bucket = 0  # of sequence lengths that share compiled kernels
        if backend == "flash" and workload.device == "cuda":
            like = torch.empty(0, 0, 0, model.head_size, dtype=dtype, device=device)
            bucket = launch.longest_bucket(launch.PORTABLE, like, workload.seq_len)
        group = model.heads // model.kv_heads
        try:
            hashes = fingerprint.fingerprint(run, device, dtype, model.head_size, group, bucket)
        except SelfTestFailed as error:
            raise ValueError(str(error)) from error
        kernel = kernels_run().get(backend, kernel)
    lock: Lock = {"format": fingerprint.FORMAT, "backend": backend, "kernel": kernel}
    lock |= {"machine": fingerprint.machine(device) | _packages(backend), "fingerprint": hashes}
    if missing := [name for name in ("out", "dq", "dk", "dv") if name not in hashes]:
        lock["not_reproducible"] = missing
    if sources := fingerprint.sources(kernel):
        lock |= {"sources": sources, "compiled": fingerprint.compiled(sources)}
    if os.environ.get("TRITON_INTERPRET") == "1":
        lock["interpreter"] = True
    return run_folder.plain(lock)  # torch.__version__, for one, is no plain string


def _packages(backend: str) -> dict[str, str]:
    """Versions of the packages that the backend's kernels come from."""
    versions = {}
    for name in PACKAGES.get(backend, ()):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    if backend == "sdpa" and torch.cuda.is_available():
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return versions


def held(
    config: TrainConfig, new: Lock | None, old: Any, steps: int
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
                f"kernel.lock=strict: {config.resume} has no kernel lock to hold; "
                "kernel.lock=record makes one"
            )
        return new, "recorded now: the run had no kernel lock before"
    new = new | ({"earlier": old["earlier"]} if old.get("earlier") else {})
    differences = fingerprint.differences(old, new)
    if not differences:
        return new, None
    listed = "; ".join(f"{field}: {_short(a)} -> {_short(b)}" for field, a, b in differences)
    if config.kernel.lock != "record":
        raise ValueError(
            f"resume={config.resume}: the attention kernels are not those that the run began with, "
            f"so it would not go on as it was ({listed}); go back to those, or accept the new ones "
            "with kernel.lock=record"
        )
    past = {key: value for key, value in old.items() if key != "earlier"} | {"until_step": steps}
    note = f"accepted others from step {steps + 1:,} on: {listed}"
    return new | {"earlier": [*old.get("earlier", []), past]}, note


def _short(text: str) -> str:
    """A hash by its beginning."""
    words = text.split(" ")
    return " ".join(word[:12] if len(word) == 64 and "=" not in word else word for word in words)


def write(folder: Path, lock: Lock | None) -> None:
    """Write kernel.lock.json in the folder of a run, or take it away."""
    if lock is None:
        (folder / FILE).unlink(missing_ok=True)
    else:
        files.write_text(folder / FILE, json.dumps(lock, indent=1) + "\n")
