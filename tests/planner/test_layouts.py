"""The layout that is chosen fits, is about the fastest, and is the plainest of those."""

from dataclasses import replace
from functools import partial

import pytest

from longctx import cli
from longctx.config.asked import divisions, workload_of
from longctx.config.train_config import TrainConfig
from longctx.planner import fitting
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload

H200 = hardware.chip("NVIDIA H200", 139.8 * GIB)
HOST = 1536 * GIB


def request(*overrides: str) -> TrainConfig:
    given = {word.partition("=")[0]: word for word in overrides}
    words = {"model": "model=1b", "context.degree": "context.degree=auto"} | given
    config: TrainConfig = cli.compose("train", words.values()).config
    return config


def steps(config: TrainConfig) -> list[Workload]:
    """The step of each layout that `config` leaves open."""
    assert isinstance(config.seq_len, int)
    step = workload_of(config, "cuda", config.seq_len)
    return [step.divided(each, config.seq_len) for each in divisions(config, config.model)]


def possible(*overrides: str) -> set[tuple[str, int, str]]:
    each = steps(request(*overrides))
    return {(work.strategy, work.context, work.context_method) for work in each}


def test_layouts_follow_devices_heads_and_backend():
    ulysses = {("fsdp", 1, "ulysses"), ("fsdp", 2, "ulysses")}  # of 32 heads
    gathered = {("fsdp", degree, "allgather") for degree in (2, 3, 6)}
    assert possible("devices=6", "strategy.name=fsdp") == ulysses | gathered
    assert possible("devices=6", "strategy.name=fsdp", "attention=sdpa") == ulysses
    assert {strategy for strategy, _, _ in possible("devices=2")} == {"ddp", "fsdp"}
    assert {degree for _, degree, _ in possible("devices=4", "context.method=ulysses")} == {1, 2, 4}
    assert len(possible("devices=1")) == 1
    with pytest.raises(ValueError, match=r"context=3: context\.method=ulysses"):
        steps(request("devices=3", "context.degree=3", "context.method=ulysses"))


@pytest.mark.parametrize(
    "words",
    [
        "model=124m devices=2 seq_len=4096",
        "seq_len=1048576 batch_size=1",
        "seq_len=262144 model=8b",
    ],
)
def test_the_choice_fits_and_is_about_the_fastest(words):
    each = steps(request("devices=8", *words.split()))
    merge = "batch_size=1" not in words
    chosen, reason = fitting.choose_layout(each, H200, HOST, merge)
    decided = [fitting.decide(work, H200, HOST, merge) for work in each]
    fit = [work for work in decided if fitting.fits(work, fitting.room(H200), HOST)]
    clearly = fitting.SURE * max(fitting.tokens_per_second(work, H200) for work in fit)
    assert chosen in fit and fitting.tokens_per_second(chosen, H200) >= clearly and reason
    for plainer in fit[: fit.index(chosen)]:
        is_slower = fitting.tokens_per_second(plainer, H200) < clearly
        assert is_slower or (fitting.on_host(plainer) and not fitting.on_host(chosen))


def test_choice_if_nothing_fits_or_gpu_is_unknown():
    each = steps(request("devices=8", "seq_len=16777216"))
    chosen, reason = fitting.choose_layout(each, replace(H200, memory=8 * GIB), HOST)
    assert chosen.context == 8 and chosen.strategy == "fsdp"
    assert "none is predicted to fit" in reason
    unknown = hardware.chip("Toaster", 139.8 * GIB)
    chosen, _ = fitting.choose_layout(steps(request("devices=8", "seq_len=65536")), unknown, HOST)
    assert chosen.context == 1


def test_ulysses_wins_a_tie():
    each = steps(request("devices=8", "seq_len=1048576", "context.degree=8"))
    chosen, _ = fitting.choose_layout(each, H200, HOST)
    assert len({work.context_method for work in each}) == 2 and chosen.context_method == "ulysses"


@pytest.mark.parametrize("words", [("strategy.name=fsdp",), ("context.degree=8",), ()])
def test_the_longest_sequence_of_all_layouts_fits(words):
    config = request("devices=8", "batch_size=1", "accumulate=1", *words)
    step = workload_of(config, "cuda", 512)
    ats = [partial(step.divided, division) for division in divisions(config, config.model)]
    work = fitting.longest(ats, fitting.room(H200), HOST, 512)
    assert work is not None
    assert work.seq_len % (512 * 1) == 0 and work.seq_len % work.context == 0
    assert fitting.fits(work, fitting.room(H200), HOST)
    for at in ats:
        longer = at(work.seq_len + 4096)
        assert fitting.first_that_fits(longer, fitting.room(H200), HOST) is None
    assert fitting.longest(ats, GIB / 2, HOST, 512) is None
