"""Compile a run's attention kernels, and import torch's compiler, while the run reads its data.

Nothing fails here: the run compiles the same again and reports the error.
"""

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch

from longctx.attention import registered
from longctx.kernels import loads_in_threads
from longctx.parallel.devices import dtype_of
from longctx.spec.step import Workload


def begin(workload: Workload) -> Callable[[], object]:
    """Begin to compile for `workload`, in threads; return a function that waits for them."""
    if workload.device != "cuda" or not torch.cuda.is_available():
        return lambda: None
    device = torch.device("cuda", torch.cuda.current_device())
    model, chosen = workload.model, workload.attention
    element = torch.empty(1, 1, 1, 1, dtype=dtype_of(workload.precision), device=device)
    q = element.expand(1, workload.seq_len, model.heads // model.kv_heads, model.head_size)
    tasks = registered()[chosen.backend].compile_tasks(q, q[:, :, :1], chosen.options)
    if workload.compile:
        # It takes 1.4 s
        tasks.append(partial(importlib.import_module, "torch._inductor.compile_fx"))
    workers = max(1, len(tasks)) if loads_in_threads() else 1
    pool = ThreadPoolExecutor(workers, initializer=torch.cuda.set_device, initargs=(device,))
    begun = [pool.submit(task) for task in tasks]
    pool.shutdown(wait=False)

    def end() -> None:
        wait(begun)
        # The run must not find the memory of self-tests reserved, nor their peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    return end
