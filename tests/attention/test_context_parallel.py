"""Where the tokens of a row lie, and what the queries of a rank see; without any process but this.

That the exchanges send what they should is shown by tests/training/test_devices.py.
"""

import json
from pathlib import Path

import pytest
import torch

from longctx.attention import Mask
from longctx.attention.context_parallel import Context, dealt, padded
from longctx.attention.exchange import AllGather, HaloExchange, Ranks, Ulysses
from tests.processes import run_on


def context_of(rank: int, ranks: int, method: str) -> Context:
    context = Context(method=method)
    context.ranks = Ranks(rank, ranks)
    return context


def packed(rows: int, length: int, share: float, seed: int = 0) -> Mask:
    """Documents that begin at random tokens."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(rows, length, generator=generator) < share
    return Mask.documents(begins.cumsum(1))


def bound(mask: Mask, context: Context, rows: int, length: int) -> tuple[Mask, int]:
    whole = padded(length, context.ranks.count, context.method)
    return mask.padded(length, whole).bind(rows, whole, whole, "cpu"), whole


@pytest.mark.parametrize("method", ["ulysses", "allgather"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 50, 1027, 5000])
def test_every_token_lies_on_one_rank(method, ranks, length):
    places = []
    for rank in range(ranks):
        context = context_of(rank, ranks, method)
        mask, N = bound(packed(2, length, 0.02), context, 2, length)
        places.append(context.shards(mask, N).local(torch.arange(N).expand(2, N)))
        assert (places[-1].diff(dim=1) > 0).all()
    assert N >= length
    assert len({part.shape for part in places}) == 1
    assert torch.equal(torch.cat(places, 1).sort(1).values, torch.arange(N).expand(2, N))


@pytest.mark.parametrize("method", ["ulysses", "allgather"])
@pytest.mark.parametrize("window", [None, 5, 300, 100_000])
@pytest.mark.parametrize("documents", [False, True])
def test_a_query_sees_the_keys_that_it_saw(method, window, documents):
    ranks, length = 3, 1000
    for rank in range(ranks):
        context = context_of(rank, ranks, method)
        mask = packed(2, length, 0.01) if documents else Mask.causal()
        mask, N = bound(mask, context, 2, length)
        unsharded = mask if window is None else mask.windowed(window)
        shards = context.shards(mask, N)
        shard = shards.mask(unsharded)
        first, last = (shards.local(x) for x in (unsharded.first, unsharded.last))
        keys = torch.arange(N)
        if isinstance(shard.exchange, Ulysses):
            first, last = unsharded.first, unsharded.last
        elif isinstance(shard.exchange, HaloExchange):
            keys = torch.arange(rank * N // ranks - shard.exchange.width, (rank + 1) * N // ranks)
        else:
            assert isinstance(shard.exchange, AllGather)
        assert torch.equal(keys[shard.first], first.expand_as(shard.first).long())
        assert torch.equal(keys[shard.last], last.expand_as(shard.last).long())
        assert_transposed(shard)


def assert_transposed(mask: Mask) -> None:
    """qfirst and qlast name the queries whose intervals hold each key."""
    i = torch.arange(mask.first.shape[1])
    for key in range(0, mask.qfirst.shape[1], 41):
        sees = (mask.first <= key) & (key <= mask.last)
        among = (mask.qfirst[:, key, None] <= i) & (i <= mask.qlast[:, key, None])
        assert torch.equal(sees, among)


@pytest.mark.parametrize("ranks", [2, 4, 7, 8])
@pytest.mark.parametrize("share", [0.0, 0.0003, 0.002, 0.01])
def test_ranks_see_about_as_many_pairs(ranks, share):
    length = 256 * 40 * ranks
    mask = packed(4, length, share).bind(4, length, length, "cpu")
    pairs = (mask.last - mask.first + 1).unflatten(1, (-1, 256)).sum(2).expand(4, -1)
    work = pairs.gather(1, dealt(mask, length // 256, ranks)).unflatten(1, (ranks, -1))
    work = work.sum(2).float()
    assert (work.max(1).values / work.mean(1)).max() < 1.05


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_shared_rows_are_those_of_one_device(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs that NCCL connects")
    run_on(2, Path(__file__).with_name("shared_rows.py"), device, tmp_path / "out.json")
    differ = json.loads((tmp_path / "out.json").read_text())
    assert len(differ) == (36 if device == "cuda" else 12)
    assert not any(differ.values()), differ
