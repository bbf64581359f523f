"""Which rows each optimizer step takes: of one length, or of shorter ones first (seq_len_schedule),
always the same number of tokens.

A stage is a number of steps at one row length; the shorter the rows, the more of them. Each stage
has its own rows, packed at its length, and its own order, so what a step sees is a pure function of
the seed and the step's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from torch.utils.data import Dataset

from longctx.data import Data, Mixture
from longctx.data.rows import Joined
from longctx.training.run import Run


class Stage(NamedTuple):
    """Steps first .. last - 1 of rows of `seq_len` tokens, `batch_size` in a micro-batch."""

    seq_len: int
    first: int
    last: int
    batch_size: int


def stages(run: Run) -> list[Stage]:
    """The stages of a run, the last of them at its seq_len."""
    work, shorter, first = run.workload, list[Stage](), 0
    for seq_len, steps in run.config.seq_len_schedule or []:
        batch_size = work.batch_size * work.seq_len // seq_len
        shorter.append(Stage(seq_len, first, first + steps, batch_size))
        first += steps
    return [*shorter, Stage(work.seq_len, first, run.max_steps, work.batch_size)]


class Schedule:
    """The rows of all `stages`, and the order in which each data rank takes them; `data` has one
    data set for each stage.
    """

    def __init__(self, run: Run, data: Sequence[Data | Mixture]) -> None:
        self.run, self.data, self.stages = run, list(data), stages(run)
        self.rows: Dataset = (
            data[0].train if len(data) == 1 else Joined([part.train for part in data])
        )

    def order(self, rank: int, steps_done: int) -> Iterator[list[int]]:
        """The row numbers of each step from step `steps_done` on, on data rank `rank`, without
        end.
        """
        work, offset = self.run.workload, 0
        for stage, data in zip(self.stages, self.data, strict=True):
            last = stage is self.stages[-1]
            if last or steps_done < stage.last:
                consumed = max(0, steps_done - stage.first) * self.rows_per_step(stage)
                stream = iter(data.order(self.run.config.seed, rank, work.data_ranks, consumed))
                size = stage.batch_size * work.accumulate
                rows = (list(islice(stream, size)) for _ in count())
                steps = None if last else stage.last - max(steps_done, stage.first)
                yield from ([offset + row for row in step] for step in islice(rows, steps))
            offset += len(data.train)

    def epoch(self, step: int) -> float:
        """How often the data has been seen after `step` steps."""
        stages = (
            (min(step, stage.last) - stage.first, stage, data)
            for stage, data in zip(self.stages, self.data, strict=True)
        )
        return sum(
            max(0, steps) * self.rows_per_step(stage) / len(data.train)
            for steps, stage, data in stages
        )

    def rows_per_step(self, stage: Stage) -> int:
        """Rows of a step over all micro-batches and devices."""
        return stage.batch_size * self.run.workload.accumulate * self.run.workload.data_ranks
