"""The memory benchmark: which points it measures, and that those under way fit the GPU together."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import memory
from longctx.planner import fitting
from longctx.planner.hardware import GIB
from longctx.planner.peak_memory import predict


@pytest.mark.slow
def test_default_points_are_of_every_kind_and_fit() -> None:
    usual = memory.Options()
    longest = {
        name: (max(getattr(usual, name)),) for name in ("lengths", "long_lengths", "naive_lengths")
    }
    points = memory.combinations(dataclasses.replace(usual, **longest), [])
    assert len(points) * min(len(getattr(usual, name)) for name in longest) >= 40
    described = [(name, str(run.settings())) for name, run in points]
    assert len(set(described)) == len(described)
    work = [run.workload for _, run in points]
    kinds = {
        (c.attention.backend, c.attention.options.get("kernel"), c.lora.rank, c.memory.policy)
        for c in work
    }
    for policy in ("fast", "balanced", "long"):
        assert {("flash", "auto", None, policy), ("flash", "portable", None, policy)} <= kinds
        assert {
            ("sdpa", "auto", None, policy),
            ("naive", None, None, policy),
            ("flash", "auto", 16, policy),
        } <= kinds
    assert max(predict(fitting.with_policy(c, c.memory.policy)).peak for c in work) < 40 * GIB


def test_points_under_way_fit_together() -> None:
    room, lock = memory.Room(10.0), threading.Lock()
    now, most = 0.0, 0.0

    def work(size: float) -> None:
        nonlocal now, most
        with room.reserved(size):
            with lock:
                now += min(size, 10.0)
                most = max(most, now)
            time.sleep(0.002)
            with lock:
                now -= min(size, 10.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [3.0, 4.0, 5.0, 12.0, 1.0] * 6))
    assert most <= 10.0
    assert room.free == 10.0
