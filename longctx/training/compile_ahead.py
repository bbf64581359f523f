"""What a run compiles in any case, begun while it reads its data: the flash kernels, tested side by
side, those of a block and of the loss, and the modules of torch.compile.

Nothing fails here. What goes wrong is found by the run, which needs the same in its own turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from longctx.distributed.devices import dtype_of
from longctx.kernels import flash_op
from longctx.model import GPT, compile_cache
from longctx.planner.workload import Workload

Task = Callable[[], object]
TOKENS = 128  # of the step that compiles: a multiple of 16, which Triton makes code for
VOCABULARY = 16384  # where the tokenizer's is not known yet


def begin(work: Workload) -> Callable[[], object]:
    """Begin what a run of `work` needs, in threads; returns what waits for the end of it."""
    if work.device != "cuda" or not torch.cuda.is_available():
        return lambda: None
    device = torch.device("cuda", torch.cuda.current_device())
    tasks: list[Task] = [compile_cache.use] if work.compile else []
    if work.attention.backend == "flash":
        tasks += [partial(test_flash, work, device, part) for part in ("forward", "backward")]
    if work.precision != "fp32":  # which has no kernels of ours outside of attention
        tasks.append(partial(step_of_one_block, work, device))
    return side_by_side([partial(on, device, task) for task in tasks])


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


def on(device: torch.device, task: Task) -> None:
    """`task` with `device` as the current one, which in a new thread is the first."""
    with torch.cuda.device(device):
        task()


def test_flash(work: Workload, device: torch.device, part: str) -> None:
    """The self-test of a pass, which compiles it, for the heads and rows of `work`."""
    model, dtype = work.model, dtype_of(work.precision)
    kernel = work.attention.options.get("kernel", "auto")
    chosen = flash_op.implementation(device, dtype, model.head_size, kernel)
    one = torch.empty(1, 1, 1, 1, dtype=dtype, device=device)
    q = one.expand(1, work.seq_len, model.heads // model.kv_heads, model.head_size)
    flash_op.trusted(part, chosen, q, q[:, :, :1])


def step_of_one_block(work: Workload, device: torch.device) -> None:
    """Forward and backward of a model of one block on few tokens.

    Its weights are zeros: drawing others would change those that the run draws.
    """
    config = replace(work.model, layers=1, vocab_size=work.model.vocab_size or VOCABULARY)
    with torch.device("meta"):
        model = GPT(config, "naive")
    model.to_empty(device=device)
    for weight in model.parameters():
        weight.data.zero_()
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
    with torch.autocast("cuda", dtype_of(work.precision)):
        loss = model(tokens, tokens, reduction="sum", scale=torch.ones((), device=device))
    loss.backward()
    del model, loss
    torch.cuda.empty_cache()
