"""The process that `benchmarks.traffic` runs under `ncu`: every case between cudaProfilerStart and
Stop.

    ncu ... python -m benchmarks.counted CASES OUT

Dirty lines stay in the L2 cache when a kernel ends. So each case is preceded and followed by a
write of more than the cache holds: what the case leaves behind is written back while its window is
open. The bytes of that second write, known from a first window without a case, are subtracted.

CASES is JSON; OUT gets the windows in order and our kernels' shared memory.
"""

from __future__ import annotations

import gc
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from longctx.attention import Mask, attention, kernels_run

FLUSHED = 2**29  # bytes, several times the largest L2 cache


@triton.jit
def flush_l2(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fill x with zeros; its name ends a case in ncu's list."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(x + at, tl.zeros([SIZE], tl.int32))


def main(argv: list[str]) -> None:
    """Run every case forward and backward, the profiler on around each."""
    buffer = torch.empty(FLUSHED // 4, device="cuda", dtype=torch.int32)

    def flush() -> None:
        flush_l2[(buffer.numel() // 4096,)](buffer, SIZE=4096)

    def window(case: Callable[[], Any]) -> Any:
        flush()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        result = case()
        flush()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        return result

    flush()
    window(lambda: None)
    windows: list[dict[str, Any]] = [{"case": "nothing"}]
    for case in json.loads(argv[0]):
        windows += counted(case, window)
        gc.collect()
        torch.cuda.empty_cache()
    Path(argv[1]).write_text(json.dumps({"windows": windows, "shared": shared()}))


def counted(
    case: dict[str, Any], window: Callable[[Callable[[], Any]], Any]
) -> list[dict[str, Any]]:
    """One case: once to compile, then its forward and its backward, each in a window."""
    backend, _, kernel = case["backend"].partition(":")
    options = {"kernel": kernel} if kernel else {}
    mask = {"causal": Mask.causal(), "full": Mask.full()}[case["mask"]]
    T, shape = case["tokens"], (1, case["tokens"], case["heads"], case["head_size"])
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    do, bound = torch.randn(shape, device="cuda", dtype=torch.bfloat16), mask.bind(1, T, T, "cuda")

    def forward() -> torch.Tensor:
        return attention(q, k, v, mask=bound, backend=backend, **options)

    torch.autograd.grad(forward(), (q, k, v), do)
    out = window(forward)
    window(lambda: torch.autograd.grad(out, (q, k, v), do))
    return [
        case | {"kernel": kernels_run()[backend], "direction": way}
        for way in ("forward", "backward")
    ]


def shared() -> list[dict[str, Any]]:
    """Shared memory of every kernel of ours that was compiled in this process."""
    package = importlib.import_module("longctx.kernels")
    kernels_by_key = {}
    for name in [x.name for x in pkgutil.walk_packages(package.__path__, "longctx.kernels.")]:
        module = sys.modules.get(name)
        for function in vars(module).values() if module else ():
            for cache in getattr(function, "device_caches", {}).values():
                for compiled in cache[0].values():
                    meta = compiled.metadata
                    label = f"{name.rpartition('.')[2]}: {meta.name}"
                    key = label, meta.shared / 1024, meta.num_warps
                    kernels_by_key[key] = dict(
                        zip(("kernel", "shared_kib", "warps"), key, strict=True)
                    )
    return list(kernels_by_key.values())


if __name__ == "__main__":
    main(sys.argv[1:])
