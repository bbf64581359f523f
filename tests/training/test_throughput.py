"""The arithmetic of a logged row, the parts of a step, and how long ranks wait."""

import pytest
import torch

from longctx.config.asked import workload_of
from longctx.config.train_config import TrainConfig
from longctx.model import GPTConfig
from longctx.parallel.mesh import Parallel
from longctx.training.batches import MicroBatch
from longctx.training.throughput import Meter
from tests.training.sample_run import steps

OF_SEVERAL = {"communication_ms", "tokens_per_second_per_device"}


def meter_of(model: GPTConfig | None = None) -> Meter:
    config = TrainConfig(model=model or GPTConfig(vocab_size=10))
    parallel = Parallel.of(config, "cpu")
    return Meter(workload_of(config, "cpu", 128), parallel)


def batch(scored: int, real: int, tokens: int, pairs: int) -> list[MicroBatch]:
    x = torch.zeros(1, tokens, dtype=torch.int64)
    return [MicroBatch(x, x, None, scored, real, pairs)]  # type: ignore[arg-type]


def test_a_row_is_the_mean_over_its_target_tokens():
    meter = meter_of()
    meter.add(batch(10, 80, 100, 500), torch.tensor(50.0))
    meter.add(batch(30, 100, 100, 700), torch.tensor(30.0))
    row = meter.row(torch.tensor(1.5))
    assert row["loss"] == pytest.approx(80 / 40)
    assert row["tokens_seen"] == 180
    assert row["padding_share"] == pytest.approx(20 / 200)
    assert row["grad_norm"] == 1.5
    assert "mfu" not in row
    assert row["process_peak_gib"] > 0
    meter.add(batch(1, 100, 100, 1), torch.tensor(7.0))
    assert meter.row(torch.tensor(0.0))["loss"] == pytest.approx(7.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the meter reads."""
    now = [100.0]
    monkeypatch.setattr("longctx.training.throughput.time.perf_counter", lambda: now[0])
    return now


def test_time_set_aside_is_not_a_steps(clock):
    meter = meter_of()
    clock[0] += 2.0
    meter.add(batch(10, 100, 100, 1), torch.tensor(1.0))
    with meter.set_aside():
        clock[0] += 50.0
    row = meter.row(torch.tensor(0.0))
    assert row["ms_per_step"] == pytest.approx(2000)
    assert row["tokens_per_second"] == pytest.approx(50)
    assert row["seconds"] == pytest.approx(52)
    resumed = meter_of()
    resumed.restore(meter.state() | {"device_seconds": 8 * 52.0})
    clock[0] += 10.0
    resumed.add(batch(10, 100, 100, 1), torch.tensor(1.0))
    row = resumed.row(torch.tensor(0.0))
    assert (row["seconds"], row["device_seconds"]) == pytest.approx((62, 8 * 52 + 10))


def test_mfu_counts_visible_pairs_of_real_tokens(clock):
    model = GPTConfig(vocab_size=64, layers=2)
    meter = meter_of(model)
    clock[0] += 4.0
    meter.flops_of_device = 1e9
    meter.add(batch(10, 100, 128, 5000), torch.tensor(1.0))
    flops = 6 * model.matmul_parameters() * 100 + 12 * 5000 * 128 * 2
    assert meter.row(torch.tensor(0.0))["mfu"] == pytest.approx(flops / 4.0 / 1e9)


def test_every_row_of_a_run_has_the_parts_of_its_step(trained):
    rows = steps(trained(max_steps=7, log_every=3, val_every=2))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6, 7]
    for row in rows:
        parts = [row[f"{part}_ms"] for part in ("forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert not row.keys() & OF_SEVERAL
    assert sum(parts) <= rows[-1]["ms_per_step"]
