"""Show what attention=flash runs here: implementation, launch configs, self-test, kernel lock."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longctx.config.command_config import ShowOptions
from longctx.kernels.attention import flash_op, hopper_size, launch
from longctx.kernels.attention.fingerprint import fingerprint, machine, sources
from longctx.kernels.attention.selftest import SelfTestFailed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def run(options: ShowOptions) -> None:
    """Print the description as JSON.

    Raises ValueError if the kernel cannot run here or fails its self-test.
    """
    device, dtype = torch.device("cpu"), torch.float32
    if torch.cuda.is_available():
        device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    dtype = DTYPES.get(options.dtype, dtype)
    if options.kernel == "hopper" and not flash_op.runs_hopper(device, dtype, options.head_size):
        raise ValueError(
            "kernel=hopper needs a Hopper GPU, 16 bits and a head size of 64, 72 .. 256; "
            "use kernel=portable"
        )
    print(json.dumps(described(options, device, dtype), indent=1))


def described(options: ShowOptions, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the lock, the launch configs, and the seconds of self-test and first run."""
    implementation = flash_op.implementation(device, dtype, options.head_size, options.kernel)
    like = torch.empty(0, 0, 0, options.head_size, dtype=dtype, device=device)
    started, bucket = time.perf_counter(), 0
    configs: dict[str, Any] = {}
    if implementation.startswith("triton"):
        bucket = launch.longest_bucket(launch.PORTABLE, like, options.seq_len)
    if implementation == "triton-portable":
        for name in launch.PORTABLE:
            configs[name] = launch.launch_config(name, like, options.seq_len)._asdict()
    elif implementation == "triton-hopper":
        configs = hopper_configs(options.head_size, device)

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Sequence[str]]:
        last = torch.arange(q.shape[1], dtype=torch.int32)[None]
        first = torch.searchsorted(ids, ids).int()
        qlast = (torch.searchsorted(ids, ids, right=True) - 1).int()
        intervals = (x.to(device) for x in (first, last, last, qlast))
        forward = flash_op.forward_for(q, k, v)
        out, _ = forward(q, k, v, *intervals, q.shape[3] ** -0.5, None, implementation)
        # Hopper's kernel adds dq up in any order
        has_dq = implementation != "triton-hopper"
        return out, ("out", "dq", "dk", "dv") if has_dq else ("out", "dk", "dv")

    try:
        hashes = fingerprint(attend, device, dtype, options.head_size, 1, bucket)
    except SelfTestFailed as error:
        raise ValueError(str(error)) from error
    is_tested = implementation.startswith("triton") and device.type != "cpu"
    return {
        "backend": "flash",
        "kernel": implementation,
        "self_test": "passed" if is_tested else "not needed",
        "seconds": round(time.perf_counter() - started, 3),
        "launch": configs,
        "machine": machine(device),
        "fingerprint": hashes,
        "sources": sources(implementation),
    }


def hopper_configs(head_size: int, device: torch.device) -> dict[str, Any]:
    """Return module → its launch config for heads of `head_size`, if it has a choice."""
    flash_op.kernels("triton-hopper", device)  # configures the modules
    modules = {name: import_module(f"longctx.kernels.attention.{name}") for name in launch.HOPPER}
    size = hopper_size(head_size)
    return {
        name: module.CONFIGS[size]._asdict()
        for name, module in modules.items()
        if size in module.CONFIGS
    }
