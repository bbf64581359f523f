"""Compile a run's kernels while it reads its data: the flash kernels by their self-tests, those of
a block and of the loss by a step of one block. Import torch.compile's modules meanwhile.

Nothing fails here: the run compiles the same again and reports the error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

import torch

from longctx.attention import registered
from longctx.kernels import loads_in_threads
from longctx.model import GPT, compile_cache
from longctx.parallel.devices import dtype_of
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import Workload

Task = Callable[[], object]
TOKENS = 128  # of the compiling step: Triton specializes for multiples of 16
SWITCH_INTERVAL = 1e-4  # seconds after which a computing thread lets another one run


def begin(workload: Workload) -> Callable[[], object]:
    """Begin to compile for `workload`, in threads; return a function that waits for them."""
    if workload.device != "cuda" or not torch.cuda.is_available():
        return lambda: None
    device = torch.cuda.current_device()
    tasks: list[Task] = [compile_cache.preload] if workload.compile else []
    tasks += attention_tasks(workload)
    if not workload.model.transformers:
        tasks.append(partial(step_of_one_block, workload))
    workers = max(1, len(tasks)) if loads_in_threads() else 1
    wait_for_all = side_by_side([partial(on, device, task) for task in tasks], workers)

    def end() -> None:
        wait_for_all()
        # The run must not find the memory of this model reserved, nor its peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    return end


def side_by_side(tasks: Sequence[Task], workers: int) -> Callable[[], object]:
    """Begin the tasks, in so many threads; return a function that waits for them all.

    Reading a corpus makes thousands of system calls, and waits for the interpreter's lock after
    each: with the usual interval of 5 ms that adds up to seconds.
    """
    usual_interval = sys.getswitchinterval()

    def attempted(task: Task) -> None:
        with suppress(Exception):
            task()

    def end() -> None:
        wait(begun)
        sys.setswitchinterval(usual_interval)

    sys.setswitchinterval(SWITCH_INTERVAL)
    pool = ThreadPoolExecutor(workers)
    begun: list[Future[None]] = [pool.submit(attempted, task) for task in tasks]
    pool.shutdown(wait=False)
    return end


def on(device: int, task: Task) -> None:
    """Call `task` with `device` as the current one; a new thread begins with the first."""
    with torch.cuda.device(device):
        task()


def attention_tasks(workload: Workload) -> list[Task]:
    """Return tasks that compile the backend's kernels for heads and lengths of `workload`."""
    model, dtype = workload.model, dtype_of(workload.precision)
    device = torch.device("cuda", torch.cuda.current_device())
    element = torch.empty(1, 1, 1, 1, dtype=dtype, device=device)
    q = element.expand(1, workload.seq_len, model.heads // model.kv_heads, model.head_size)
    chosen = workload.attention
    return registered()[chosen.backend].compile_tasks(q, q[:, :, :1], chosen.options)


def step_of_one_block(workload: Workload) -> None:
    """Compute forward and backward of the model with one block of each sort, on few tokens.

    Its weights are zeros: random ones would change the weights of the run.
    """
    with torch.device("meta"):
        model = GPT(with_few_layers(workload.model, keep_every=0), "naive")
    model.to_empty(device=workload.device)
    for weight in model.parameters():
        weight.data.zero_()
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=workload.device)
    scale = torch.ones((), device=workload.device)
    with torch.autocast(workload.device, torch.bfloat16, workload.precision != "fp32"):
        loss = model(tokens, tokens, reduction="sum", scale=scale)
    loss.backward()


def with_few_layers(model: GPTConfig, keep_every: int) -> GPTConfig:
    """Return `model` with the first layer of each sort, and the first few: the blocks that are
    recomputed together, and one more.
    """
    kinds = model.blocks()
    first = {kinds.index(kind) for kind in kinds}
    return model.with_layers(sorted(first | set(range(min(model.layers, keep_every + 1)))))
