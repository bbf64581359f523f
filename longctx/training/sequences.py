"""The sequences of a run: its data, equal on all ranks, and the order in which steps take them.

With seq_len_schedule= shorter sequences come first. A stage is a number of steps at one length. The
shorter its sequences, the more of them, so that every step has the same number of tokens. Each
stage is packed at its own length and has an order of its own. The order is a pure function of the
step, so a resumed run needs no state for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import NamedTuple

from torch.utils.data import ConcatDataset, Dataset

from longctx.config.data_config import DataConfig
from longctx.config.train_config import TrainConfig
from longctx.data import Data, load
from longctx.parallel.mesh import Parallel
from longctx.training.run import Run


class DataDiffers(ValueError):
    """Raised on every rank if ranks see different documents, or split or tokenize differently."""


def data_config(config: TrainConfig) -> DataConfig:
    """Return the sources of documents and tokenizer; a resumed run that began with init= has the
    tokenizer in its own folder.
    """
    if config.init is None or config.resume is None:
        return config.data
    return replace(config.data, tokenizer=config.resume)


def shared_data(run: Run, parallel: Parallel) -> Data:
    """Open the data of `run`; raise DataDiffers, on every rank, unless all ranks see the same.

    Each rank opens files of its own machine at a time of its own, so they may differ.
    """
    data = run.data or load(data_config(run.config), run.workload.seq_len)
    expected, *others = parallel.all_gather_objects(data.identity())
    for rank, found in enumerate(others, start=1):
        for name, value in expected.items():
            if found[name] != value:
                raise DataDiffers(
                    f"data={run.config.data.source}: ranks do not have the same {name}: "
                    f"rank 0 has {value}, rank {rank} has {found[name]}; give all ranks the same "
                    "files, and change none while the run starts"
                )
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
        """Yield the numbers of each step's sequences on data rank `rank`, from step `steps_done`
        on, without end.
        """
        workload, offset = self.run.workload, 0
        for stage in self.stages:
            # Stages that are done are passed over; the last one has no end
            last = stage is self.stages[-1]
            if last or steps_done < stage.last:
                consumed = max(0, steps_done - stage.first) * self.per_step(stage)
                stream = iter(
                    stage.data.order(self.run.config.seed, rank, workload.data_ranks, consumed)
                )
                size = stage.batch_size * workload.accumulate
                numbers = (list(islice(stream, size)) for _ in count())
                steps = None if last else stage.last - max(steps_done, stage.first)
                yield from ([offset + number for number in step] for step in islice(numbers, steps))
            # `dataset` has the sequences of all stages, one stage after another
            offset += len(stage.data.train)

    def epoch(self, step: int) -> float:
        """Return how often the data has been seen after `step` steps."""
        return sum(
            max(0, min(step, stage.last) - stage.first)
            * self.per_step(stage)
            / len(stage.data.train)
            for stage in self.stages
        )

    def per_step(self, stage: Stage) -> int:
        """Return the sequences of a step over all micro-batches and devices."""
        return stage.batch_size * self.run.workload.accumulate * self.run.workload.data_ranks
