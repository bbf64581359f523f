"""The arithmetic of a logged row, and the parts of a step."""

from pathlib import Path

import pytest
import torch

import train
from longctx.config.train_config import TrainConfig
from longctx.model import GPTConfig
from longctx.parallel.mesh import Parallel
from longctx.planner.workload import workload_of
from longctx.training.batches import MicroBatch, StepBatch
from longctx.training.callbacks import Spikes
from longctx.training.throughput import Meter, StepSplit
from tests.training.sample_run import Overrides, steps


def meter_of(model: GPTConfig | None = None) -> Meter:
    config = TrainConfig(model=model or GPTConfig(vocab_size=10))
    parallel = Parallel(config, "cpu")
    return Meter(workload_of(config, "cpu", 128), parallel, Spikes(config, print))


def batch(scored: int, real: int, tokens: int, pairs: int) -> StepBatch:
    x = torch.zeros(1, tokens, dtype=torch.int64)
    return StepBatch([MicroBatch(x, x, None, scored, real, pairs)])  # type: ignore[arg-type]


def test_a_row_is_the_mean_over_its_target_tokens() -> None:
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


def test_time_set_aside_is_not_a_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("longctx.training.throughput.time.perf_counter", lambda: clock[0])
    meter = meter_of()
    clock[0] += 2.0
    meter.add(batch(10, 100, 100, 1), torch.tensor(1.0))
    with meter.set_aside():
        clock[0] += 50.0
    row = meter.row(torch.tensor(0.0))
    assert row["ms_per_step"] == pytest.approx(2000)
    assert row["tokens_per_second"] == pytest.approx(50)
    assert row["seconds"] == pytest.approx(52)


def test_a_restored_window_ends_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("longctx.training.throughput.time.perf_counter", lambda: clock[0])
    straight, first, second = (meter_of() for _ in range(3))
    for meter in (straight, first):
        meter.begin()
        meter.waited = 0.5
        meter.add(batch(3, 7, 9, 11), torch.tensor(0.1))
    clock[0] += 2.0
    second.restore(first.state())
    second.begin()
    for meter in (straight, second):
        meter.add(batch(5, 8, 9, 11), torch.tensor(0.7))
    clock[0] += 1.0
    one, other = straight.row(torch.tensor(0.0)), second.row(torch.tensor(0.0))
    assert one == other | {"process_peak_gib": one["process_peak_gib"]}
    assert one["ms_per_step"] == pytest.approx(1500)


def test_mfu_counts_visible_pairs_of_real_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("longctx.training.throughput.time.perf_counter", lambda: clock[0])
    model = GPTConfig(vocab_size=64, layers=2)
    meter = meter_of(model)
    clock[0] = 4.0
    meter.flops_of_device = 1e9
    meter.add(batch(10, 100, 128, 5000), torch.tensor(1.0))
    flops = 6 * model.matmul_parameters() * 100 + 12 * 5000 * 128 * 2
    assert meter.row(torch.tensor(0.0))["mfu"] == pytest.approx(flops / 4.0 / 1e9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_are_summed_over_micro_batches(device: str) -> None:
    split = StepSplit(torch.device(device))
    split.begin(wanted=True)
    for part in ("forward", "backward", "forward", "backward", "optimizer"):
        split.mark(part)
    assert list(split.row()) == ["forward_ms", "backward_ms", "optimizer_ms"]
    assert split.row() == {}
    split.begin(wanted=False)
    split.mark("forward")
    assert split.row() == {}


def test_every_row_of_a_run_has_the_parts_of_its_step(overrides: Overrides, tmp_path: Path) -> None:
    assert train.main(overrides(name="r", max_steps=7, log_every=3, val_every=2)) == 0
    rows = steps(tmp_path / "runs" / "r")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6, 7]
    for row in rows:
        parts = [row[f"{part}_ms"] for part in ("forward", "backward", "optimizer")]
        assert min(parts) > 0
    assert sum(parts) <= rows[-1]["ms_per_step"]
