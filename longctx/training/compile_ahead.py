"""What a run compiles in any case, begun while it reads its data: the flash kernels, compiled and
tested side by side, and the modules of torch.compile.

Nothing fails here. What goes wrong is found by the run, which needs the same in its own turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import torch

from longctx.distributed.devices import dtype_of
from longctx.kernels import flash_op
from longctx.model import compile_cache
from longctx.planner.workload import Workload

Task = Callable[[], object]


def begin(work: Workload) -> Callable[[], object]:
    """Begin what a run of `work` needs, in threads; returns what waits for the end of it."""
    if work.device != "cuda" or not torch.cuda.is_available():
        return lambda: None
    tasks: list[Task] = [compile_cache.use] if work.compile else []
    if work.attention.backend == "flash":
        tasks += flash_tests(work)
    return side_by_side(tasks)


def side_by_side(tasks: Sequence[Task]) -> Callable[[], object]:
    """Begin each task in a thread of its own; returns what waits for them all."""

    def attempted(task: Task) -> None:
        with suppress(Exception):
            task()

    # No daemons: a process that ends meanwhile waits, since compilers do not survive its exit
    with_threads = ThreadPoolExecutor(max(1, len(tasks)), thread_name_prefix="compile ahead")
    begun: list[Future[None]] = [with_threads.submit(attempted, task) for task in tasks]
    with_threads.shutdown(wait=False)
    return lambda: wait(begun)


def flash_tests(work: Workload) -> list[Task]:
    """The self-tests of both passes, which compile them, for the heads and rows of `work`."""
    model, device = work.model, torch.device("cuda", torch.cuda.current_device())
    dtype = dtype_of(work.precision)
    kernel = work.attention.options.get("kernel", "auto")
    chosen = flash_op.implementation(device, dtype, model.head_size, kernel)
    one = torch.empty(1, 1, 1, 1, dtype=dtype, device=device)
    q = one.expand(1, work.seq_len, model.heads // model.kv_heads, model.head_size)
    k = one.expand(1, work.seq_len, 1, model.head_size)

    def test(part: str) -> None:
        with torch.cuda.device(device):  # threads begin with the first
            flash_op.trusted(part, chosen, q, k)

    return [lambda: test("forward"), lambda: test("backward")]
