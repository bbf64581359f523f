"""The kernel lock of a run: the kernels that compute its attention, identified before step 1.

A lock has backend and kernel, versions of everything that compiles, sha256 of the sources, and of
the results for fixed inputs. A resumed run compares its lock with the checkpoint's, since those
kernels made its weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longctx.attention import Mask, attention, kernels_run, registered
from longctx.attention.description import SCORES
from longctx.kernels import integers, machine, sha256, sources
from longctx.parallel.devices import dtype_of
from longctx.runs import run_folder
from longctx.spec.step import Workload
from longctx.training.run import Run

Lock = dict[str, Any]
TOKENS = 1000  # of the inputs
BORDERS = (97, 98, 298, 333)  # of documents in them


def of_workload(workload: Workload) -> Lock:
    """Return the lock of the attention that `workload` uses; of layers with a window apart, if
    these have a backend of their own.
    """
    if workload.attention.window is not None:
        full, windows = (
            of_workload(replace(workload, attention=x)) for x in workload.attention.each
        )
        return full | {"windows": windows}
    # Its kernels run once, forward and backward, on a small input. A run needs these kernels
    # anyway.
    chosen, device = workload.attention, torch.empty(0, device=workload.device).device
    backend, kernel = registered()[chosen.backend], "unknown before it runs"
    results: dict[str, str] = {}
    score = SCORES[chosen.options.get("score", "none")][-1]
    for source in map(Path, filter(None, (backend.source(), score, *workload.model.plugin_files))):
        results[source.name] = hashlib.sha256(source.read_bytes()).hexdigest()
    if chosen.description.reproducible:
        # The first use of a kernel tests it, and may raise SelfTestFailed
        results |= fingerprint(workload, device)
        kernel = kernels_run()[chosen.backend]
    lock: Lock = {"backend": chosen.backend, "kernel": kernel, "sources": sources(kernel)}
    lock |= {"machine": machine(device) | backend.versions(), "fingerprint": results}
    return run_folder.plain(lock)  # torch.__version__, for one, is no plain string


def fingerprint(workload: Workload, device: torch.device) -> dict[str, str]:
    """Return sha256 of attention's reproducible results for fixed inputs."""
    # Head size, dtype, group and length choose the kernel as they do in the run
    model, chosen = workload.model.largest_attention.model, workload.attention
    group, dtype = model.heads // model.kv_heads, dtype_of(workload.precision)
    like = torch.empty(0, 0, 0, model.head_size, dtype=dtype, device=device)
    backend = registered()[chosen.backend]
    length = backend.kernels_change_at(like, workload.seq_len) + TOKENS
    # The same values on every device; made on the GPU, since long sequences need millions of them
    with torch.device(device):
        shapes = [(1, length, heads, model.head_size) for heads in (group, 1, 1, group)]
        numbers = [integers(shape, n + 50, 256) for n, shape in enumerate(shapes)]
        q, k, v, do = (((x - 127.5) / 64).to(dtype) for x in numbers)
    with torch.device("cpu"):  # whatever the default device is
        token = torch.arange(length)
        of_thousand = torch.bucketize(token % TOKENS, torch.tensor(BORDERS), right=True)
        doc_ids = (token // TOKENS * (len(BORDERS) + 1) + of_thousand)[None]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        mask = Mask.documents(doc_ids)
        out = attention(q, k, v, mask=mask, backend=chosen.backend, **chosen.options)
    names = chosen.description.reproducible.get(kernels_run()[chosen.backend], ())
    results = {"out": out}
    if set(names) - {"out"}:
        gradients = torch.autograd.grad(out, (q, k, v), do)
        results |= zip(("dq", "dk", "dv"), gradients, strict=True)
    shape = f"{length} tokens in documents, {group} heads on 1, size {model.head_size}"
    return {"inputs": f"{workload.precision}, {shape}"} | {n: sha256(results[n]) for n in names}


def locked(run: Run) -> Run:
    """Return `run` with its lock, and a line if its kernels are not those of its checkpoint.

    Raises ValueError, one line with every field that differs, unless kernel.lock=record accepts
    the difference.
    """
    if run.config.kernel.lock == "off" or run.config.dry_run:
        return replace(run, kernel_lock=None)
    old, now = run.kernel_lock, of_workload(run.workload)
    if run.workload.device == "cuda":
        # The run must not find the memory of self-tests reserved, nor their peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = replace(run, kernel_lock=now)
    if run.checkpoint is None:
        return run
    if not isinstance(old, dict):
        return replace(run, lock_note="recorded now: the run had no kernel lock before")
    before, after = run_folder.flat(old), run_folder.flat(now)
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    if not changed:
        return run
    listed = "; ".join(
        f"{key}: {before.get(key)!s:.12} -> {after.get(key)!s:.12}" for key in changed
    )
    if run.config.kernel.lock != "record":
        problem = f"resume={run.folder}: the attention kernels are not those of the run ({listed})"
        raise ValueError(f"{problem}; go back to those, or accept these with kernel.lock=record")
    note = f"accepted others from step {run.steps_done + 1:,} on: {listed}"
    return replace(run, lock_note=note)
