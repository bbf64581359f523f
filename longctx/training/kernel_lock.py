"""The kernel lock of a run: the kernels that compute its attention, identified before step 1.

A lock is a dictionary of plain values: backend and kernel, versions of everything that compiles,
sha256 of the sources, and sha256 of the results for fixed inputs. kernel.lock.json, every
checkpoint and wandb's configuration hold it. A resumed run compares its lock with the checkpoint's,
since those kernels made its weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx import files
from longctx.attention import Mask, attention, kernels_run, registered
from longctx.attention.description import AttentionConfig
from longctx.config.train_config import TrainConfig
from longctx.kernels import fingerprint, launch, machine, sources
from longctx.parallel.devices import dtype_of
from longctx.runs import run_folder
from longctx.spec.step import Workload

Lock = dict[str, Any]
FILE = "kernel.lock.json"
FORMAT = 2
HASHED = ("out", "dq", "dk", "dv")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def of_workload(workload: Workload) -> Lock:
    """Return the lock of the attention that `workload` uses."""
    device = torch.device(workload.device)
    if workload.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    model, dtype = workload.model, dtype_of(workload.precision)
    # head size and group choose the kernel; other sizes do not change its code
    group = model.heads // model.kv_heads
    return identify(workload.attention, device, dtype, model.head_size, group, workload.seq_len)


def identify(
    chosen: AttentionConfig,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    group: int,
    seq_len: int,
) -> Lock:
    """Return the lock of the kernels for such heads and sequences.

    They run once, forward and backward, on a small input. A run needs these kernels anyway.
    """
    backend = registered()[chosen.backend]
    # kernel → the results with the same bits every time
    promised = chosen.description.reproducible

    def run(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor) -> tuple[Tensor, Sequence[str]]:
        mask = Mask.documents(doc_ids)
        out = attention(q, k, v, mask=mask, backend=chosen.backend, **chosen.options)
        return out, promised.get(kernels_run()[chosen.backend], ())

    hashes, kernel = dict[str, str](), "unknown before it runs"
    if source := backend.source():
        hashes = {source.name: hashlib.sha256(source.read_bytes()).hexdigest()}
    if promised:
        # Head size, dtype and device choose the kernel, so it is empty
        like = torch.empty(0, 0, 0, head_size, dtype=dtype, device=device)
        bucket = backend.kernels_change_at(like, seq_len)
        # the first use of a kernel tests it, and may raise SelfTestFailed
        hashes |= fingerprint(run, device, dtype, head_size, group, bucket)
        kernel = kernels_run()[chosen.backend]

    # plain values only: JSON holds them, and `differences` compares them as text
    lock: Lock = {"format": FORMAT, "backend": chosen.backend, "kernel": kernel}
    lock |= {"machine": machine(device) | backend.versions(), "fingerprint": hashes}
    if missing := [name for name in HASHED if name not in hashes]:
        lock["not_reproducible"] = missing
    if files_of_kernel := sources(kernel):
        lock["sources"] = files_of_kernel
    if os.environ.get("TRITON_INTERPRET") == "1":
        lock["interpreter"] = True
    return run_folder.plain(lock)  # torch.__version__, for one, is no plain string


def show(kernel: str, head_size: int, seq_len: int, dtype: str) -> None:
    """Print the lock of attention=flash here as JSON, with self-test, seconds and launch configs.

    Raises ValueError if the kernel cannot run here or fails its self-test.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    precise = DTYPES.get(dtype, torch.bfloat16 if on_gpu else torch.float32)
    chosen = AttentionConfig("flash", {"kernel": kernel})
    started = time.perf_counter()
    lock = identify(chosen, device, precise, head_size, 1, seq_len)
    is_tested = lock["kernel"].startswith("triton") and on_gpu
    like = torch.empty(0, 0, 0, head_size, dtype=precise, device=device)
    lock |= {
        "self_test": "passed" if is_tested else "not needed",
        "seconds": round(time.perf_counter() - started, 3),
        "launch": launch.configs_of(lock["kernel"], like, seq_len),
    }
    print(json.dumps(lock, indent=1))


def held(
    config: TrainConfig, new: Lock | None, old: Any, steps: int
) -> tuple[Lock | None, str | None]:
    """Return the lock with which a run resumed after `steps` steps continues, and a line to print.

    `old` is the checkpoint's, None if it has none. Raises ValueError, one line with every field
    that differs, unless kernel.lock=record accepts the difference.
    """
    if new is None:
        return None, None
    if not isinstance(old, dict):
        return new, "recorded now: the run had no kernel lock before"
    new = new | ({"earlier": old["earlier"]} if old.get("earlier") else {})
    changed = differences(old, new)
    if not changed:
        return new, None
    listed = "; ".join(f"{field}: {before[:12]} -> {now[:12]}" for field, before, now in changed)
    if config.kernel.lock != "record":
        raise ValueError(
            f"resume={config.resume}: the attention kernels are not those of the run, so it would "
            f"not continue as it was ({listed}); go back to those, or accept the new ones with "
            "kernel.lock=record"
        )
    past = {key: value for key, value in old.items() if key != "earlier"} | {"until_step": steps}
    note = f"accepted others from step {steps + 1:,} on: {listed}"
    return new | {"earlier": [*old.get("earlier", []), past]}, note


def differences(old: Lock, new: Lock) -> list[tuple[str, str, str]]:
    """Return (field, before, now) of every field that changed; `earlier` locks do not count."""
    before, now = (
        {field: str(value) for field, value in run_folder.flat(lock).items() if field != "earlier"}
        for lock in (old, new)
    )
    pairs = [(field, before.get(field, "none"), now.get(field, "none")) for field in before | now]
    return [pair for pair in pairs if pair[1] != pair[2]]


def write(folder: Path, lock: Lock | None) -> None:
    """Write kernel.lock.json in the folder of a run, or remove it if `lock` is None."""
    if lock is None:
        (folder / FILE).unlink(missing_ok=True)
    else:
        files.write_text(folder / FILE, json.dumps(lock, indent=1) + "\n")
