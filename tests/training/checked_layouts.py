"""context.check in one group of processes, for runs in which something is wrong, or nothing.

    python -m torch.distributed.run --nproc-per-node 2 tests/training/checked_layouts.py CASES OUT

CASES is JSON: case → {"fault": a name of FAULTS or null, "keys": the command line of the run}.
Rank 0 writes OUT: case → what the check says.
"""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from longctx import system
from longctx.attention import Mask
from longctx.attention.registry import Attention
from longctx.cli import compose
from longctx.config.asked import with_vocabulary, workload_of
from longctx.data import Data, load
from longctx.data.sequences import IGNORED, PackedSequences
from longctx.model import GPT
from longctx.parallel.mesh import Parallel
from longctx.training import context_check, module
from longctx.training.run import Run, scheduled
from longctx.training.train_step import TrainState
from tests.training.sample_run import on_all_ranks

begin, attend, forward, masks = TrainState.__init__, Attention.__call__, GPT.forward, GPT._masks
clip, order = module.clip_gradients, Data.order
read_row = PackedSequences.__getitem__
loss_weight, accumulates = Parallel.loss_weight, Parallel.accumulates
work: Any = None  # of the model that computes now: faults are of several ranks alone


def begun(self: TrainState, run: Run, parallel: Parallel) -> None:
    global work
    work = run.workload
    begin(self, run, parallel)


Batch = tuple[Tensor, Tensor, Mask]


def with_batch(change: Callable[[Tensor, Tensor, Mask], Batch]) -> AbstractContextManager[Any]:
    """The model sees a batch as `change` leaves it."""

    def faulty(self: GPT, tokens: Tensor, targets: Any = None, mask: Any = None, **keys: Any):
        if work.devices > 1:
            labels = torch.full_like(tokens, IGNORED) if targets is None else targets.clone()
            tokens, labels, mask = change(tokens, labels, mask)
            targets = None if targets is None else labels
        return forward(self, tokens, targets, mask, **keys)

    return patch.object(GPT, "forward", faulty)


def full_mask(tokens: Tensor, targets: Tensor, mask: Mask) -> Batch:
    assert mask.doc_ids is not None
    starts = torch.searchsorted(mask.doc_ids, mask.doc_ids)
    ends = torch.searchsorted(mask.doc_ids, mask.doc_ids, right=True) - 1
    return tokens, targets, Mask.intervals(starts, ends)


def rounded_documents(tokens: Tensor, targets: Tensor, mask: Mask) -> Batch:
    """Documents begin at multiples of the degree."""
    assert mask.doc_ids is not None
    starts = torch.arange(tokens.shape[1]) // work.context * work.context
    return tokens, targets, Mask.documents(mask.doc_ids[:, starts])


def shifted_labels(tokens: Tensor, targets: Tensor, mask: Mask) -> Batch:
    """Each rank shifts the labels of its part: the last of them is wrong."""
    n = tokens.shape[1] // work.context
    targets[:, n - 1 :: n] = 0
    return tokens, targets, mask


def rounded_length(tokens: Tensor, targets: Tensor, mask: Mask) -> Batch:
    """The tokens past a multiple of the degree are left out."""
    targets[:, tokens.shape[1] // work.context * work.context :] = IGNORED
    return tokens, targets, mask


def no_windows(self: GPT, *arguments: Any) -> Any:
    if work.devices == 1:
        return masks(self, *arguments)
    with patch.object(self, "config", replace(self.config, window=None)):
        return masks(self, *arguments)


def stale_keys(self: Attention, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    """Forward is right; backward has the keys of another rank."""
    if work.devices > 1:
        k, n = k.clone(), k.shape[1] // 2
        k.register_hook(lambda gradient: gradient.roll(n, 1))
    return attend(self, q, k, v, *rest)


def means_of_ranks(self: Parallel, scored: int) -> Tensor:
    """Each group of ranks divides by its own count."""
    if self.ranks == 1:
        return loss_weight(self, scored)
    return torch.tensor(self.ranks / self.data_ranks / max(scored, 1))


def no_number(self: GPT, tokens: Tensor, targets: Any = None, *rest: Any, **keys: Any) -> Any:
    """0 / 0 on ranks of which no target is scored."""
    loss = forward(self, tokens, targets, *rest, **keys)
    if targets is None or work.devices == 1:
        return loss
    n = -(-tokens.shape[1] // work.context)
    start = dist.get_rank() % work.context * n
    scored = (targets[:, start : start + n] != IGNORED).any()
    return loss if scored else loss * torch.nan


def larger_norm(optimizer: Any, most: Any) -> Tensor:
    """The norm is added up over the ranks that hold the same gradients."""
    return clip(optimizer, most) * work.devices**0.5


def tokens_of_each_rank(self: PackedSequences, row: int) -> dict[str, Tensor]:
    """Row numbers are right; the tokens are those of another tokenizer."""
    values = read_row(self, row)
    return values | {"tokens": values["tokens"] + dist.get_rank()}


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "full mask": lambda: with_batch(full_mask),
    "rounded documents": lambda: with_batch(rounded_documents),
    "shifted labels": lambda: with_batch(shifted_labels),
    "rounded length": lambda: with_batch(rounded_length),
    "no windows": lambda: patch.object(GPT, "_masks", no_windows),
    "stale keys": lambda: patch.object(Attention, "__call__", stale_keys),
    "means of ranks": lambda: patch.object(Parallel, "loss_weight", means_of_ranks),
    "counted twice": lambda: patch.object(Parallel, "counted_once", lambda self, count: count),
    "no number": lambda: patch.object(GPT, "forward", no_number),
    "larger norm": lambda: patch.object(module, "clip_gradients", larger_norm),
    "no average": lambda: patch.object(
        Parallel, "accumulates", lambda self, module, last: accumulates(self, module, False)
    ),
    "rows of each rank": lambda: patch.object(
        Data, "order", lambda self, seed, *rest: order(self, seed + dist.get_rank(), *rest)
    ),
    "tokens of each rank": lambda: patch.object(
        PackedSequences, "__getitem__", tokens_of_each_rank
    ),
}


def answer_of(keys: list[str], fault: str | None) -> str:
    """What context.check says of the run with these `keys`."""
    composed = compose("train", keys)
    parallel = Parallel.of(composed.config, "cpu")
    config = replace(composed.config, devices=parallel.ranks)
    assert isinstance(config.seq_len, int)
    parallel.launch()
    data = load(config.data, config.seq_len)
    work = workload_of(config, "cpu", config.seq_len, config.model)
    run = scheduled(config, with_vocabulary(work, data.tokenizer.vocab_size))
    parallel = parallel.with_mesh(run.workload, run.workload.attention)
    try:
        faulty = FAULTS[fault]() if fault else nullcontext()
        with patch.object(TrainState, "__init__", begun), faulty:
            return str(context_check.compare_with_one(run, data, parallel))
    except context_check.CheckFailed as error:
        return f"failed: {error}"


def main(cases: dict[str, Any], out: Path) -> None:
    with on_all_ranks(out) as answers:
        for name, case in cases.items():
            answers[name] = answer_of(case["keys"], case["fault"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    system.exit_with(0)
