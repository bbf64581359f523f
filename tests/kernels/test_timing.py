"""Laps: the time between begin and end counts, and nothing waits for it."""

import pytest
import torch

from longctx.attention import communication as timing
from longctx.attention.communication import Laps


def test_laps_count_only_what_lies_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    laps = Laps(on_gpu=False)
    for inside, outside in ((2.0, 0.0), (0.5, 10.0)):
        laps.begin()
        now[0] += inside
        laps.end()
        now[0] += outside
    laps.begin()
    assert laps.ms() == [2000.0, 500.0]


@pytest.mark.gpu
def test_laps_of_a_gpu_are_its_own_and_not_waited_for() -> None:
    laps = Laps(on_gpu=True)
    for _ in range(3):
        laps.begin()
        torch.cuda._sleep(200_000_000)
        laps.end()
    assert not laps._ended[-1].query()
    assert all(50 < ms < 300 for ms in laps.ms())
