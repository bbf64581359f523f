"""What a step's batch holds and counts."""

import os
import signal
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from longctx.config.train_config import TrainConfig
from longctx.data.sequences import IGNORED
from longctx.training.batches import collate_step, lost_worker, micro_batch, validation_batches
from tests.training.sample_run import row, sample_run


def test_counts_leave_padding_out():
    micro = micro_batch([row(5, 4), row(3, padding=6), row(9)])
    assert micro.tokens.shape == (3, 9)
    assert micro.scored == 4 + 3 + 2 + 8
    assert micro.real == 9 + 3 + 9
    assert micro.pairs == 15 + 10 + 6 + 45
    conversation = row(4, 3)
    conversation["targets"][4:] = IGNORED  # its beginning, all the user's, at the end of a sequence
    micro = micro_batch([conversation])
    assert (micro.real, micro.scored, micro.pairs) == (7, 3, 10 + 6)


def test_attention_of_padding_costs_by_the_token():
    """One long document of padding would cost its square."""
    padding = 1 << 20
    micro = micro_batch([row(5, padding=padding)])
    assert micro.pairs == 15
    assert micro.mask.pairs(1, 5 + padding, 5 + padding) < 15 + 100 * padding


def test_pairs_are_the_mean_over_layers():
    rows = [row(5, 4), row(3, padding=6), row(9)]
    windowed = (9 + 7) + 5 + 17  # two keys each, one for the first of a document
    assert micro_batch(rows, {2: 1}).pairs == windowed
    assert micro_batch(rows, {None: 1, 2: 3}).pairs == round((76 + 3 * windowed) / 4)


@pytest.mark.parametrize("wanted", [0, 1, 4, 7, 100])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_share_validation_rows_without_overlap(wanted, world_size):
    rows = [row(3, 2) for _ in range(11)]
    for number, r in enumerate(rows):
        r["tokens"][0] = number
    run = replace(sample_run(TrainConfig(batch_size=2)), val_rows=wanted)
    first_tokens: list[int] = []
    batches = set()
    for rank in range(world_size):
        parallel = SimpleNamespace(data_rank=rank, data_ranks=world_size)
        of_rank = list(validation_batches(run, SimpleNamespace(val=rows), parallel))  # type: ignore[arg-type]
        batches.add(len(of_rank))
        for micro in of_rank:
            if micro.scored:
                first_tokens += micro.tokens[:, 0].tolist()
            else:
                assert (micro.targets == IGNORED).all()
    assert len(first_tokens) == len(set(first_tokens)) == min(wanted or 11, 11)
    assert len(batches) == 1, "sharded weights are gathered equally often on every rank"


def test_worker_killed_amid_a_batch_is_lost():
    """The batch does not fit in the pipe, so a part of it is there and the rest never comes."""
    collated = partial(collate_step, micro_batch, 1 << 20, {None: 1})
    loader: Any = DataLoader([row(1 << 20)] * 16, 1, collate_fn=collated, num_workers=1)  # type: ignore[arg-type]
    batches: Any = iter(loader)
    next(batches)
    while not batches._worker_result_queue._reader.poll(10):
        next(batches)
    with pytest.raises(RuntimeError) as raised:  # noqa: PT012 (wherever this thread is)
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        next(batches)
        next(batches)
    assert str(batches._workers[0].pid) in (lost_worker(raised.value) or "")
