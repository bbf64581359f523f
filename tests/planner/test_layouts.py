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


def test_layouts_follow_devices_heads_and_backend():
    def possible(*overrides: str) -> set[tuple[str, int, str]]:
        each = steps(request(*overrides))
        return {(work.strategy, work.context, work.context_method) for work in each}

    both = possible("devices=6", "strategy.name=fsdp")  # 32 heads
    assert both == {
        ("fsdp", 1, "ulysses"),
        ("fsdp", 2, "ulysses"),
        ("fsdp", 2, "allgather"),
        ("fsdp", 3, "allgather"),
        ("fsdp", 6, "allgather"),
    }
    assert possible("devices=6", "attention=sdpa", "strategy.name=ddp") == {
        ("ddp", 1, "ulysses"),
        ("ddp", 2, "ulysses"),
    }
    assert {strategy for strategy, _, _ in possible("devices=2")} == {"ddp", "fsdp"}
    assert {degree for _, degree, _ in possible("devices=4", "context.method=ulysses")} == {1, 2, 4}
    assert len(possible("devices=1")) == 1
    named = request("devices=8")
    named = replace(named, context=replace(named.context, degree=4, method="allgather"))
    assert {work.context for work in steps(named)} == {4}
    with pytest.raises(ValueError, match=r"context=3: context\.method=ulysses does not"):
        steps(request("devices=3", "context.degree=3", "context.method=ulysses"))


def test_the_choice_fits_and_is_about_the_fastest():
    for words in (
        ["model=124m", "devices=2", "seq_len=4096"],
        ["seq_len=262144"],
        ["seq_len=1048576", "batch_size=1"],
        ["seq_len=2097152"],
        ["seq_len=262144", "model=8b"],
    ):
        each = steps(request("devices=8", *words))
        merge = "batch_size=1" not in words
        chosen, reason = fitting.choose_layout(each, H200, HOST, merge)
        decided = [fitting.decide(work, H200, HOST, merge) for work in each]
        fit = [work for work in decided if fitting.fits(work, fitting.room(H200), HOST)]
        fastest = max(fitting.tokens_per_second(work, H200) for work in fit)
        assert chosen in fit
        assert fitting.tokens_per_second(chosen, H200) >= fitting.SURE * fastest
        plainer = fit[: fit.index(chosen)]
        assert all(
            fitting.tokens_per_second(work, H200) < fitting.SURE * fastest
            or (fitting.on_host(work) and not fitting.on_host(chosen))
            for work in plainer
        )
        assert reason


def test_choice_if_nothing_fits_or_gpu_is_unknown():
    each = steps(request("devices=8", "seq_len=16777216"))
    chosen, reason = fitting.choose_layout(each, replace(H200, memory=8 * GIB), HOST)
    assert chosen.context == 8 and chosen.strategy == "fsdp"
    assert "none is predicted to fit" in reason
    unknown = hardware.chip("Toaster", 139.8 * GIB)
    chosen, _ = fitting.choose_layout(steps(request("devices=8", "seq_len=65536")), unknown, HOST)
    assert chosen.context == 1


def test_ulysses_wins_a_tie():
    for method in ("auto", "ulysses", "allgather"):
        config = request("devices=8", "seq_len=1048576", f"context.method={method}")
        config = replace(config, context=replace(config.context, degree=8))
        chosen, _ = fitting.choose_layout(steps(config), H200, HOST)
        assert chosen.context_method == ("ulysses" if method == "auto" else method)


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
    # The plainest layouts cannot hold the limit that the last one holds
    limited = fitting.longest(ats, fitting.room(H200), HOST, limit=2**20)
    assert limited is not None and limited.seq_len == 2**20
