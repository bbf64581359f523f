"""The clocks of collectives: what counts, and what does not."""

import pytest
import torch

from longctx.attention import communication
from longctx.attention.communication import Clock, measured


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list of one number that a test moves on."""
    time = [100.0]
    monkeypatch.setattr("longctx.attention.communication.time.perf_counter", lambda: time[0])
    return time


def test_spans_count_once_and_none_set_aside(now):
    clock = Clock(torch.device("cpu"))
    with clock:
        now[0] += 1.0
        with clock:
            now[0] += 2.0
    now[0] += 4.0
    assert clock.take() == pytest.approx(3.0)
    with clock.aside(), clock:
        now[0] += 1.0
    with clock:
        now[0] += 2.0
    assert clock.take() == pytest.approx(2.0)
    assert clock.take() == 0.0


def test_a_wait_lasts_from_the_last_mark(now):
    clock = Clock(torch.device("cpu"))
    clock.until_now()
    clock.mark()
    now[0] += 1.0
    clock.mark()
    now[0] += 2.0
    clock.until_now()
    now[0] += 4.0
    clock.until_now()
    assert clock.take() == pytest.approx(2.0)


def test_a_collective_is_measured_where_a_clock_runs(now):
    clock = Clock(torch.device("cpu"))

    def collective() -> None:
        with measured():
            now[0] += 1.0

    for running in (None, clock, clock, None):
        communication.start(running)
        collective()
    assert clock.take() == pytest.approx(2.0)


@pytest.mark.gpu
def test_a_gpu_counts_what_its_stream_waits_for():
    clock = Clock(torch.device("cuda"))
    with clock:
        torch.cuda._sleep(100_000_000)
    assert clock.take() > 0.01
    torch.cuda._sleep(100_000_000)
    assert clock.take() == 0.0
