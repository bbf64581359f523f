"""What follows from the number of a step: its learning rate, and which sequences it takes.

Both are pure functions, so a resumed run needs no state for them. With seq_len_schedule= shorter
sequences come first: a stage is a number of steps at one length; the shorter its sequences, the
more of them, so that every step has the same number of tokens. Each stage is packed at its own
length and has an order of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count, islice
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import ConcatDataset, Dataset

from longctx.data import Data
from longctx.training.run import Run


def learning_rate(step: int, run: Run) -> float:
    """Return the rate of step `step`, counted from 0.

    It grows linearly to `lr`, then falls as a cosine to `min_lr`·`lr` at the last step (arXiv
    1608.03983).
    """
    if step < run.warmup_steps:
        return run.lr * (step + 1) / run.warmup_steps
    progress = (step - run.warmup_steps) / max(1, run.max_steps - 1 - run.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    least = run.config.min_lr
    return run.lr * (least + (1 - least) * cosine)


class LearningRate(LRScheduler):
    """Set `learning_rate` in every parameter group, from the run's next step on."""

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        self.run = run
        for group in optimizer.param_groups:
            group["initial_lr"] = run.lr
        super().__init__(optimizer, last_epoch=run.steps_done - 1)

    def get_lr(self) -> list[float | Tensor]:
        rate = learning_rate(self.last_epoch, self.run)
        return [rate for _ in self.optimizer.param_groups]


class Stage(NamedTuple):
    """Steps first .. last - 1 of sequences of one length, `batch_size` in a micro-batch."""

    data: Data
    first: int
    last: int
    batch_size: int


class Schedule:
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
        stores = [stage.data.train for stage in self.stages]
        self.rows: Dataset = stores[0] if len(stores) == 1 else ConcatDataset(stores)

    def order(self, rank: int, steps_done: int) -> Iterator[list[int]]:
        """Yield the numbers of each step's sequences on data rank `rank`, from step `steps_done`
        on, without end.
        """
        workload, offset = self.run.workload, 0
        for stage in self.stages:
            last = stage is self.stages[-1]
            if last or steps_done < stage.last:
                consumed = max(0, steps_done - stage.first) * self.rows_per_step(stage)
                stream = iter(
                    stage.data.order(self.run.config.seed, rank, workload.data_ranks, consumed)
                )
                size = stage.batch_size * workload.accumulate
                rows = (list(islice(stream, size)) for _ in count())
                steps = None if last else stage.last - max(steps_done, stage.first)
                yield from ([offset + row for row in step] for step in islice(rows, steps))
            offset += len(stage.data.train)

    def epoch(self, step: int) -> float:
        """Return how often the data has been seen after `step` steps."""
        return sum(
            max(0, min(step, stage.last) - stage.first)
            * self.rows_per_step(stage)
            / len(stage.data.train)
            for stage in self.stages
        )

    def rows_per_step(self, stage: Stage) -> int:
        """Return the sequences of a step over all micro-batches and devices."""
        return stage.batch_size * self.run.workload.accumulate * self.run.workload.data_ranks
