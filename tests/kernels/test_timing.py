"""Laps: what lies between begin and end counts, and nothing waits for it."""

import time

import pytest
import torch

from longctx.kernels.timing import CYCLES, Laps


def test_only_what_lies_inside_counts() -> None:
    laps = Laps(on_gpu=False)
    for inside, outside in ((0.02, 0.0), (0.0, 0.1)):
        laps.begin()
        time.sleep(inside)
        laps.end()
        time.sleep(outside)
    laps.begin()
    first, second = laps.ms()
    assert 20 <= first and second < 20


@pytest.mark.gpu
def test_a_gpus_laps_are_its_own() -> None:
    laps, started = Laps(on_gpu=True), time.perf_counter()
    for _ in range(3):
        laps.begin()
        torch.cuda._sleep(int(0.1 * CYCLES))
        laps.end()
    assert time.perf_counter() - started < 0.1
    assert all(50 < ms < 300 for ms in laps.ms())
