"""Which rows each optimizer step takes: of one length, or of shorter ones first (seq_len_schedule),
always as many tokens.

A stage is a number of steps at one row length, with as many more rows as they are shorter. Each
stage has its own rows, packed at its length, and its own order, so what a step sees is a pure
function of the seed and the step's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from torch.utils.data import Dataset, Sampler

from longctx.config.train_config import CompleteConfig
from longctx.data import Data, Mixture
from longctx.data.rows import Joined


class Stage(NamedTuple):
    """Steps first .. last - 1 of rows of `seq_len` tokens, `batch_size` in a micro-batch."""

    seq_len: int
    first: int
    last: int
    batch_size: int


def stages(config: CompleteConfig) -> list[Stage]:
    """The stages of a run, the last of them at its seq_len."""
    found, first = [], 0
    for seq_len, steps in config.seq_len_schedule or []:
        found.append(
            Stage(seq_len, first, first + steps, config.batch_size * config.seq_len // seq_len)
        )
        first += steps
    return [*found, Stage(config.seq_len, first, config.max_steps, config.batch_size)]


class Schedule:
    """The rows of all `stages`, and the order in which this rank takes them; `data` has one data
    set for each stage.
    """

    def __init__(self, config: CompleteConfig, data: Sequence[Data | Mixture]) -> None:
        self.config, self.data, self.stages = config, list(data), stages(config)
        self.rows: Dataset = (
            data[0].train if len(data) == 1 else Joined([part.train for part in data])
        )

    def order(self, rank: int, done: int) -> Sampler[list[int]]:
        """The row numbers of each step from step `done` on."""
        return _Steps(self, rank, done)

    def epoch(self, step: int) -> float:
        """How often the data has been seen after `step` steps."""
        taken = (
            (min(step, stage.last) - stage.first, stage, data)
            for stage, data in zip(self.stages, self.data, strict=True)
        )
        return sum(
            max(0, steps) * self.rows_per_step(stage) / len(data.train)
            for steps, stage, data in taken
        )

    def rows_per_step(self, stage: Stage) -> int:
        """Rows of a step over all micro-batches and devices."""
        return stage.batch_size * self.config.accumulate * self.config.devices


class _Steps(Sampler[list[int]]):
    def __init__(self, schedule: Schedule, rank: int, done: int) -> None:
        self.schedule, self.rank, self.done = schedule, rank, done

    def __iter__(self) -> Iterator[list[int]]:
        config, offset = self.schedule.config, 0
        for n, (stage, data) in enumerate(
            zip(self.schedule.stages, self.schedule.data, strict=True)
        ):
            last = n == len(self.schedule.stages) - 1
            if last or self.done < stage.last:
                steps = max(0, self.done - stage.first)
                consumed = steps * self.schedule.rows_per_step(stage)
                stream = iter(data.order(config.seed, self.rank, config.devices, consumed))
                left = (
                    None if last else stage.last - max(self.done, stage.first)
                )  # the last goes on as long as asked
                rows = (
                    list(islice(stream, stage.batch_size * config.accumulate)) for _ in iter(int, 1)
                )
                yield from ([offset + row for row in step] for step in islice(rows, left))
            offset += len(data.train)
