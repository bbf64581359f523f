"""context.check in one group of processes, for runs in which something is wrong, or nothing.

    python -m torch.distributed.run --nproc-per-node 2 tests/training/checked_layouts.py CASES OUT

CASES is JSON: case → {"fault": a name of FAULTS or null, "keys": the command line of the run}.
Rank 0 writes OUT: case → what the check says.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
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

begin, attend, forward = TrainState.__init__, Attention.__call__, GPT.forward
clip, order, weight_of = module.clip_gradients, Data.order, Parallel.loss_weight
accumulates, windowed = Parallel.accumulates, Mask.windowed
read_row = PackedSequences.__getitem__
work: Any = None  # of the model that computes now: faults are of several ranks alone


def begun(self: TrainState, run: Run, parallel: Parallel) -> None:
    global work
    work = run.workload
    begin(self, run, parallel)


Batch = tuple[Tensor, Tensor, Mask]


def seen(change: Callable[[Tensor, Tensor, Any], Batch]) -> Callable[..., Any]:
    """A forward of the model, which sees a batch as `change` leaves it."""

    def faulty(self: GPT, tokens: Tensor, targets: Any = None, mask: Any = None, **keys: Any):
        if work.devices > 1:
            labels = torch.full_like(tokens, IGNORED) if targets is None else targets.clone()
            tokens, labels, mask = change(tokens, labels, mask)
            targets = None if targets is None else labels
        return forward(self, tokens, targets, mask, **keys)

    return faulty


def full_mask(tokens: Tensor, targets: Tensor, mask: Any) -> Batch:
    starts = torch.searchsorted(mask.doc_ids, mask.doc_ids)
    ends = torch.searchsorted(mask.doc_ids, mask.doc_ids, right=True) - 1
    return tokens, targets, Mask.intervals(starts, ends)


def rounded_documents(tokens: Tensor, targets: Tensor, mask: Any) -> Batch:
    """Documents begin at multiples of the degree."""
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


def no_windows(self: Mask, window: int) -> Mask:
    return windowed(self, window) if work.devices == 1 else self


def stale_keys(self: Attention, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    """Forward is right; backward has the keys of another rank."""
    if work.devices > 1:
        k, n = k.clone(), k.shape[1] // 2
        k.register_hook(lambda gradient: gradient.roll(n, 1))
    return attend(self, q, k, v, *rest)


def means_of_ranks(self: Parallel, scored: int) -> Tensor:
    """Each group of ranks divides by its own count."""
    own = torch.tensor(self.ranks / self.data_ranks / max(scored, 1))
    return own if self.ranks > 1 else weight_of(self, scored)


def no_number(self: GPT, tokens: Tensor, targets: Any = None, *rest: Any, **keys: Any) -> Any:
    """0 / 0 on ranks of which no target is scored."""
    loss = forward(self, tokens, targets, *rest, **keys)
    if targets is None or work.devices == 1:
        return loss
    n = -(-tokens.shape[1] // work.context)
    start = dist.get_rank() % work.context * n
    return loss if (targets[:, start : start + n] != IGNORED).any() else loss * torch.nan


# What is replaced, and by what
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "full mask": (GPT, "forward", seen(full_mask)),
    "rounded documents": (GPT, "forward", seen(rounded_documents)),
    "shifted labels": (GPT, "forward", seen(shifted_labels)),
    "rounded length": (GPT, "forward", seen(rounded_length)),
    "no windows": (Mask, "windowed", no_windows),
    "stale keys": (Attention, "__call__", stale_keys),
    "means of ranks": (Parallel, "loss_weight", means_of_ranks),
    "counted twice": (Parallel, "counted_once", lambda self, count: count),
    "no number": (GPT, "forward", no_number),
    # Added up over the ranks that hold the same gradients
    "larger norm": (module, "clip_gradients", lambda *x: clip(*x) * work.devices**0.5),
    "no average": (
        Parallel,
        "accumulates",
        lambda self, part, last: accumulates(self, part, False),
    ),
    "rows of each rank": (
        *(Data, "order"),
        lambda self, seed, *rest: order(self, seed + dist.get_rank(), *rest),
    ),
    # Row numbers are right; the tokens are those of another tokenizer
    "tokens of each rank": (
        *(PackedSequences, "__getitem__"),
        lambda self, row: (x := read_row(self, row)) | {"tokens": x["tokens"] + dist.get_rank()},
    ),
}


def answer_of(keys: list[str], fault: str | None) -> str:
    """What context.check says of the run with these `keys`."""
    composed = compose("train", keys)
    parallel = Parallel.of(composed.config, "cpu")
    config: Any = replace(composed.config, devices=parallel.ranks)
    parallel.launch()
    data = load(config.data, config.seq_len)
    workload = workload_of(config, "cpu", config.seq_len, config.model)
    run = scheduled(config, with_vocabulary(workload, data.tokenizer.vocab_size))
    faulty = patch.object(*FAULTS[fault]) if fault else nullcontext()
    try:
        length = patch.dict(context_check.LENGTH, cpu=max(192, config.seq_len // 2))
        with patch.object(TrainState, "__init__", begun), faulty, length:
            meshed = parallel.with_mesh(workload, workload.attention)
            return str(context_check.compare_with_one(run, data, meshed))
    except context_check.CheckFailed as error:
        return f"failed: {error}"


def main(cases: dict[str, Any], out: Path) -> None:
    with on_all_ranks(out) as answers:
        for name, case in cases.items():
            answers[name] = answer_of(case["keys"], case["fault"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    system.exit_with(0)
