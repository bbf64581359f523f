"""Compile, while a run reads its data, what it needs in any case: the flash kernels, by their
self-tests, and those of a block and of the loss, by a step of one block. torch.compile's modules
are imported meanwhile.

Nothing fails here: the run compiles the same again and reports the error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

import torch

from longctx.distributed.devices import dtype_of
from longctx.kernels import HAS_TRITON, flash_op, relaunch
from longctx.model import GPT, compile_cache
from longctx.planner.workload import Workload
from longctx.stop_signal import UNNEEDED
from longctx.training.context_check import with_few_layers

Task = Callable[[], object]
TOKENS = 128  # of the step that compiles: a multiple of 16, which Triton makes code for
SWITCH_INTERVAL = 1e-4  # seconds after which a thread that computes lets another one run


def begin(work: Workload) -> Callable[[], object]:
    """Begin to compile for a run of `work`, in threads; returns what waits for them."""
    if work.device != "cuda" or not torch.cuda.is_available():
        return lambda: None
    if HAS_TRITON:
        relaunch.load_one_at_a_time()
    device = torch.cuda.current_device()
    tasks: list[Task] = [compile_cache.preload] if work.compile else []
    if work.attention.backend == "flash":
        tasks += [partial(test_flash, work, part) for part in ("forward", "backward")]
    tasks.append(partial(step_of_one_block, work))
    wait_for_all = side_by_side([partial(on, device, task) for task in tasks])

    def end() -> None:
        wait_for_all()
        torch.cuda.reset_peak_memory_stats(device)

    return end


def side_by_side(tasks: Sequence[Task]) -> Callable[[], object]:
    """Begin each task in a thread of its own; returns what waits for them all.

    Reading a corpus makes thousands of system calls, and after each it waits for the interpreter's
    lock: with the usual interval of 5 ms, for seconds where a task computes in Python.
    """
    usual_interval = sys.getswitchinterval()

    def attempted(task: Task) -> None:
        with suppress(Exception):
            task()

    def end() -> None:
        wait(begun)
        sys.setswitchinterval(usual_interval)

    sys.setswitchinterval(SWITCH_INTERVAL)
    pool = ThreadPoolExecutor(max(1, len(tasks)), thread_name_prefix=UNNEEDED)
    begun: list[Future[None]] = [pool.submit(attempted, task) for task in tasks]
    pool.shutdown(wait=False)
    return end


def on(device: int, task: Task) -> None:
    """`task` with `device` as the current one, which in a new thread is the first."""
    with torch.cuda.device(device):
        task()


def test_flash(work: Workload, part: str) -> None:
    """The self-test of a pass, which compiles it, for the heads and rows of `work`."""
    model, dtype = work.model, dtype_of(work.precision)
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = work.attention.options.get("kernel", "auto")
    chosen = flash_op.implementation(device, dtype, model.head_size, kernel)
    one = torch.empty(1, 1, 1, 1, dtype=dtype, device=device)
    q = one.expand(1, work.seq_len, model.heads // model.kv_heads, model.head_size)
    flash_op.trusted(part, chosen, q, q[:, :, :1])


def step_of_one_block(work: Workload) -> None:
    """Forward and backward of the model with one block of each kind, on few tokens.

    Its weights are zeros: drawing others would change those that the run draws.
    """
    with torch.device("meta"):
        model = GPT(with_few_layers(work.model, keep_every=0), "naive")
    try:
        model.to_empty(device=work.device)
        for weight in model.parameters():
            weight.data.zero_()
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=work.device)
        scale = torch.ones((), device=work.device)
        with torch.autocast(work.device, torch.bfloat16, work.precision != "fp32"):
            loss = model(tokens, tokens, reduction="sum", scale=scale)
        loss.backward()
    finally:
        del model
        if work.device == "cuda":
            torch.cuda.empty_cache()
