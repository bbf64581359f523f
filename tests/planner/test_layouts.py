"""The layout that is chosen fits, is about the fastest, and is the plainest of those."""

from dataclasses import replace
from functools import partial

import pytest

from longctx.config.asked import divisions, workload_of
from longctx.planner import fitting
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.spec.step import Workload
from tests.planner.steps import FIGURES, H200, composed

HOST = 1536 * GIB


def layouts(words: str, seq_len: int = 4096) -> list[partial[Workload]]:
    """Return the layouts that a request leaves open, each of which makes a step of a length."""
    config = composed("model=1b", *words.split())
    step = workload_of(config, "cuda", seq_len)
    return [partial(step.divided, division) for division in divisions(config, config.model)]


def steps(words: str, seq_len: int = 4096) -> list[Workload]:
    """Return the step of each layout."""
    return [at(seq_len) for at in layouts(words, seq_len)]


def choose(words: str, seq_len: int, chip: hardware.Chip = H200) -> tuple[Workload, str]:
    """Return the layout chosen on `chip`, and why."""
    decided = [fitting.decide(work, chip, HOST) for work in steps(words, seq_len)]
    return fitting.choose_layout(decided, chip, HOST)


@pytest.mark.parametrize(("words", "possible"), FIGURES["layouts"])
def test_layouts_follow_devices_heads_and_backend(words, possible):
    found = [f"{x.strategy} {x.context} {x.context_method}" for x in steps(words)]
    assert sorted(found) == sorted(possible)


def test_ranks_whose_heads_do_not_go_in_parts_are_refused():
    with pytest.raises(ValueError, match=r"context=3: context\.method=ulysses does not"):
        steps("devices=3 context=3 context.method=ulysses")
    with pytest.raises(ValueError, match=r"heads_at_once=1 with context=2: ranks share"):
        steps("devices=2 context=2 memory.heads_at_once=1")
    assert {step.context for step in steps("devices=2 context=auto memory.heads_at_once=1")} == {1}


@pytest.mark.parametrize(
    ("words", "seq_len"),
    [
        ("devices=2 model.layers=4", 4096),
        *(("devices=8", n) for n in (2**18, 2**21)),
        *(("devices=8 batch_size=1", 2**20), ("devices=8 model.layers=60", 2**18)),
    ],
)
def test_the_choice_fits_and_is_about_the_fastest(words, seq_len):
    each, merge = steps(f"context=auto {words}", seq_len), "batch_size=1" not in words
    decided = [fitting.decide(work, H200, HOST, merge) for work in each]
    chosen, reason = fitting.choose_layout(decided, H200, HOST)
    fit = [work for work in decided if fitting.fits(work, fitting.room(H200), HOST)]
    sure = fitting.SURE * max(fitting.tokens_per_second(work, H200) for work in fit)
    assert fitting.tokens_per_second(chosen, H200) >= sure and reason
    for plainer in fit[: fit.index(chosen)]:
        is_slow = fitting.tokens_per_second(plainer, H200) < sure
        assert is_slow or (fitting.on_host(plainer) and not fitting.on_host(chosen))


def test_choice_if_nothing_fits_or_gpu_is_unknown():
    chosen, reason = choose("devices=8 context=auto", 2**24, replace(H200, memory=8 * GIB))
    assert chosen.context == 8 and chosen.strategy == "fsdp"
    assert "none is predicted to fit" in reason
    chosen, _ = choose("devices=8 context=auto", 2**16, hardware.chip("Toaster", 139.8 * GIB))
    assert chosen.context == 1


@pytest.mark.parametrize("method", ["auto", "ulysses", "allgather"])
def test_ulysses_wins_a_tie(method):
    chosen, _ = choose(f"devices=8 context=8 context.method={method}", 2**20)
    assert chosen.context_method == ("ulysses" if method == "auto" else method)


@pytest.mark.parametrize("words", ["context=auto strategy=fsdp", "context=8", "context=auto"])
def test_the_longest_sequence_of_all_layouts_fits(words):
    ats = layouts(f"devices=8 batch_size=1 accumulate=1 {words}", 512)
    room = fitting.room(H200) / 2
    work = fitting.longest(ats, room, HOST, 512)
    assert work is not None and fitting.fits(work, room, HOST)
    assert work.seq_len % 512 == 0 and work.seq_len % work.context == 0
    for at in ats:
        assert fitting.first_that_fits(at(work.seq_len + 4096), room, HOST) is None
    assert fitting.longest(ats, GIB / 2, HOST, 512) is None
