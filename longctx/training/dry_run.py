"""A dry run: a few steps on random tokens, for what they take of memory and time.

No corpus, no folder, no log; module, step, optimizer and loader are those of training. As a script
it is the child process in which a run may use up memory without harm:

    python -m longctx.training.dry_run REQUEST OUT      both files of JSON, see `child.in_child`
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from longctx import attention
from longctx.attention.communication import Laps
from longctx.distributed.devices import is_out_of_memory, this_machine, within_memory
from longctx.distributed.parallel import Parallel
from longctx.training.batches import StepBatch, read_ahead, train_loader
from longctx.training.child import OUT_OF_MEMORY, DryRun
from longctx.training.run import Run, run_of
from longctx.training.throughput import memory
from longctx.training.train_step import TrainState, optimizer_step
from longctx.training.validation import validation_losses


class RandomRows(Dataset[dict[str, Tensor]]):
    """Rows of random tokens in documents of `document` tokens.

    Attention takes time by the document, memory by the row.
    """

    def __init__(self, vocab_size: int, seq_len: int, document: int) -> None:
        self.vocab_size, self.seq_len, self.document = vocab_size, seq_len, document

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(row)
        tokens = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
        doc_ids = torch.arange(self.seq_len) // self.document
        padding = torch.tensor(0)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "doc_ids": doc_ids,
            "padding": padding,
        }


def dry_run(
    run: Run,
    steps: int,
    document: int | None = None,
    validate: bool = False,
    after: Callable[[int], None] | None = None,
) -> DryRun:
    """`steps` optimizer steps of `run` on rows of random tokens.

    Each row is one document, or documents of `document` tokens. With `validate` also one batch as
    validation has it; `after` is called with the number of each step that the device was given.
    Memory is that of this call on a GPU, of the process on a CPU. Running out of memory is an
    answer, not an error.
    """
    run = dataclasses.replace(run, max_steps=steps)
    work = run.workload
    measured, laps = DryRun([]), Laps(work.device == "cuda")
    gc.collect()
    if work.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    parallel = Parallel(run.config, work.device, this_machine())
    parallel.launch(folder="")
    try:
        with within_memory(work.device):
            state = TrainState(run, parallel)
            laps.begin()
            for step, batch in zip(
                range(1, steps + 1), random_batches(run, document), strict=False
            ):
                batch = batch.to(parallel.device)
                optimizer_step(state, batch, parallel)
                laps.end()
                measured.tokens = sum(micro.tokens.numel() for micro in batch.micro)
                measured.pairs = sum(micro.pairs for micro in batch.micro)
                if after is not None:
                    after(step)
                laps.begin()
            if validate:
                validation_losses(state.module, batch.micro[0], parallel)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        measured.failed = OUT_OF_MEMORY
    measured.ms = laps.ms()
    measured.memory = memory(torch.device(work.device))
    measured.kernels = attention.kernels_run()
    return measured


def random_batches(run: Run, document: int | None) -> Iterator[StepBatch]:
    """Steps of random tokens, by the loader of training."""
    work = run.workload
    assert work.model.vocab_size is not None
    rows = RandomRows(work.model.vocab_size, work.seq_len, document or work.seq_len)
    size = work.batch_size * work.accumulate
    order = (list(range(first, first + size)) for first in count(0, size))
    return read_ahead(train_loader(work, rows, order, min(run.config.workers, 1)))


def main(argv: list[str]) -> None:
    """The child's side of `child.dry_run_in_child`."""
    request: dict[str, Any] = json.loads(Path(argv[0]).read_text())
    run = run_of(request.pop("settings"), request.pop("device"))
    Path(argv[1]).write_text(json.dumps(dataclasses.asdict(dry_run(run, **request))))


if __name__ == "__main__":
    main(sys.argv[1:])
