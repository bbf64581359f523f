"""Sequences and batches: the order of a run's data, and everything that one step needs of it.

With seq_len_schedule= shorter sequences come first. A stage is a number of steps at one length. The
shorter its sequences, the more of them, so that every step has the same number of tokens. Each
stage is packed at its own length and has an order of its own. The order is a pure function of the
step, so a resumed run needs no state for it.

The loss of a step is divided by its target tokens over all micro-batches and ranks, so the
micro-batches of a step travel together. Worker processes count them on the CPU, which waits for
nothing. B sequences per micro-batch, T = seq_len tokens per sequence.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from longctx import system
from longctx.attention import Mask
from longctx.attention.mask import causal_pairs
from longctx.data import Data, load
from longctx.data.sequences import IGNORED, padding_ids
from longctx.parallel.mesh import Parallel
from longctx.training.run import Run

Windows = Mapping[int | None, int]  # layers by window, as `GPTConfig.windows` has them
NO_WINDOW: Windows = {None: 1}


class DataDiffers(ValueError):
    """Raised on every rank if ranks see different documents, or split or tokenize differently."""


def shared_data(run: Run, parallel: Parallel) -> Data:
    """Open the data of `run`; raise DataDiffers, on every rank, unless all ranks see the same."""
    # Each rank opens files of its own machine at a time of its own, so they may differ
    data = run.data or load(run.config.data_as_read, run.workload.seq_len)
    first, *others = parallel.all_gather_objects(data.fingerprint)
    for rank, found in enumerate(others, start=1):
        if found != first:
            remedy = "give all ranks the same files, and change none while the run starts"
            differ = f"ranks 0 and {rank} have other documents, another tokenizer or split"
            raise DataDiffers(f"data={run.config.data.source}: {differ}; {remedy}")
    return data


class Stage(NamedTuple):
    """Steps first .. last - 1 of sequences of one length, `batch_size` in a micro-batch."""

    data: Data
    first: int
    last: int
    batch_size: int


class Sequences:
    """The sequences of all stages, and the order in which each data rank takes them."""

    def __init__(self, run: Run, data: Data) -> None:
        self.run = run
        self.stages: list[Stage] = []
        workload, first = run.workload, 0
        for seq_len, steps in run.config.seq_len_schedule or []:
            batch_size = workload.batch_size * workload.seq_len // seq_len
            self.stages.append(Stage(data.at(seq_len), first, first + steps, batch_size))
            first += steps
        self.stages.append(Stage(data, first, run.max_steps, workload.batch_size))
        datasets = [stage.data.train for stage in self.stages]
        self.dataset: Dataset = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)

    def order(self, rank: int, steps_done: int) -> Iterator[list[int]]:
        """Yield the numbers of a data rank's sequences for each step after `steps_done`."""
        seed, workload, offset = self.run.config.seed, self.run.workload, 0
        for stage in self.stages:
            # A stage that is done has no steps left
            steps = range(max(steps_done, stage.first), stage.last)
            taken = self.taken(stage, steps_done)
            numbers = iter(stage.data.order(seed, rank, workload.data_ranks, taken))
            for _ in steps:
                step = islice(numbers, stage.batch_size * workload.accumulate)
                yield [offset + number for number in step]
            # `dataset` has the sequences of all stages, one stage after another
            offset += len(stage.data.train)

    def epoch(self, step: int) -> float:
        """Return how often the data has been seen after `step` steps."""
        return sum(self.taken(stage, step) / len(stage.data.train) for stage in self.stages)

    def taken(self, stage: Stage, step: int) -> int:
        """Return the sequences of `stage` that all ranks have taken after `step` steps."""
        steps, workload = max(0, min(step, stage.last) - stage.first), self.run.workload
        return steps * stage.batch_size * workload.accumulate * workload.data_ranks


class MicroBatch:
    """Sequences that go through the model together, and the counts of their tokens.

    No dataclass: Lightning looks for tensors inside dataclasses, and masks are frozen.
    """

    def __init__(
        self, tokens: Tensor, targets: Tensor, mask: Mask, scored: int, real: int, pairs: int
    ) -> None:
        self.tokens = tokens  # (B, T) int64
        self.targets = targets  # (B, T) int64, -100 if not scored
        self.mask = mask
        self.scored = scored  # targets that count
        self.real = real  # tokens that are not padding
        self.pairs = pairs  # visible (query, key) pairs of one head, the mean over the layers
        # Weight of each target token in the loss of the optimizer step: () float32.
        self.weight = 1.0 / torch.tensor(float(max(scored, 1)))

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on `device`; a GPU makes it from page-locked memory while it computes."""
        moved, mask = copy(self), dict[str, Any]()
        for source, target in ((self, vars(moved)), (self.mask, mask)):
            for name, x in vars(source).items():
                if isinstance(x, Tensor):
                    held = x.pin_memory() if device.type == "cuda" else x
                    target[name] = held.to(device, non_blocking=True)
        moved.mask = replace(self.mask, **mask)
        return moved


def micro_batch(
    sequences: Sequence[Mapping[str, Tensor]], windows: Windows = NO_WINDOW
) -> MicroBatch:
    """Stack sequences (see `longctx.data.sequences`) and count their targets, tokens, and the pairs
    that layers with these `windows` see.
    """
    tokens, targets, doc_ids, padding = (
        torch.stack([sequence[key] for sequence in sequences])
        for key in ("tokens", "targets", "doc_ids", "padding")
    )
    mask = Mask.documents(doc_ids)
    B, T = tokens.shape
    # Padding is short documents of its own: their pairs do not count
    lengths = torch.cat([padding_ids(length).bincount() for length in padding.flatten().tolist()])
    total = 0
    for window, layers in windows.items():
        visible = (mask if window is None else mask.windowed(window)).pairs(B, T, T)
        total += layers * (visible - int(causal_pairs(lengths, window).sum()))
    pairs = round(total / sum(windows.values()))
    real = tokens.numel() - int(padding.sum())
    return MicroBatch(tokens, targets, mask, int((targets != IGNORED).sum()), real, pairs)


def read_ahead(
    run: Run, dataset: Dataset[dict[str, Tensor]], order: Iterable[list[int]], workers: int
) -> Iterator[list[MicroBatch]]:
    """Return the micro-batches of each list of numbers in `order`, read by `workers` processes,
    which begin at once.
    """
    # If a worker dies, torch raises an error that `lost_worker` knows: at once by SIGCHLD, else at
    # its look after 5 s. With a timeout of our own it would look only after that.
    workload = run.workload
    collate = partial(
        collate_step,
        run.config.objective.traits.collate or micro_batch,
        # Of a micro-batch, also if a stage of seq_len_schedule has shorter sequences
        workload.batch_size * workload.seq_len,
        workload.model.windows(),
    )
    loader = DataLoader(
        dataset,
        batch_sampler=order,
        collate_fn=collate,
        num_workers=workers,
        worker_init_fn=_begin_worker,
    )
    # Bytes of this run's own data workers alone; no file is ever unpickled
    return map(pickle.loads, iter(loader))


def collate_step(
    collate: Callable[[Sequence[dict[str, Tensor]], Windows], MicroBatch],
    tokens: int,
    windows: Windows,
    sequences: list[dict[str, Tensor]],
) -> bytes:
    """Return the sequences of a step, all of one length, in micro-batches of `tokens` each."""
    # A data worker sends bytes through a pipe. Tensors would go through files of /dev/shm (Docker
    # gives 64 MB) and through sockets of TMPDIR (its path may be too long).
    size = tokens // len(sequences[0]["tokens"])
    groups = (sequences[start : start + size] for start in range(0, len(sequences), size))
    return pickle.dumps([collate(group, windows) for group in groups])


def lost_worker(error: BaseException) -> str | None:
    """Return the line of torch's `error` that names a lost worker by its PID, None for others."""
    line = str(error).partition("\n")[0]
    return line.rstrip(". ") if line.startswith("DataLoader ") else None


def validation_batches(run: Run, data: Data, parallel: Parallel) -> Iterator[MicroBatch]:
    """Yield this rank's part of `val_rows` sequences (0: all), spread evenly over the data set; a
    batch without a target if the rank has no sequences left, see `dealt`.
    """
    collate = run.config.objective.traits.collate or micro_batch
    available = len(data.val)
    total = min(run.val_rows or available, available)
    for numbers, is_new in dealt(total, run.workload.batch_size, parallel):
        batch = collate([data.val[number * available // total] for number in numbers], NO_WINDOW)
        if not is_new:
            batch.targets.fill_(IGNORED)
            batch.scored = 0
        yield batch


def dealt(count: int, size: int, parallel: Parallel) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield this rank's part of the numbers below `count`, at most `size` at a time.

    Every rank gets equally many groups, since sharded weights are gathered for each. A rank without
    numbers left gets [0], and False: it is not new.
    """
    mine = range(parallel.data_rank, count, parallel.data_ranks)
    per_rank = -(-count // parallel.data_ranks)  # at most
    for start in range(0, per_rank, size):
        numbers = mine[start : start + size]
        yield numbers or [0], bool(numbers)


def _begin_worker(worker: int) -> None:
    # A signal to the whole process group must not end a worker while the parent still saves a
    # checkpoint; the parent's own, should it have to insist, is the second.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda n, _: signal.signal(n, signal.SIG_DFL) and None)
    # torch's own look at the parent takes 5 s, and a stopped worker never looks
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        system.end_with_parent(parent.pid, signal.SIGKILL)
