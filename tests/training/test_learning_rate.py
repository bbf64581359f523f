"""The learning rate of every step: warm-up, schedule, floor."""

import pytest

from longctx.config.train_config import TrainConfig
from longctx.training.learning_rate import learning_rate
from tests.training.sample_run import sample_run


def config(**changes: object):
    return sample_run(TrainConfig(**changes), "cpu")  # type: ignore[arg-type]


def test_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    run = config(max_steps=101, warmup_steps=10, lr=0.5, min_lr=0.2)
    rates = [learning_rate(step, run) for step in range(101)]
    assert rates[:10] == pytest.approx([0.05 * n for n in range(1, 11)])
    assert max(rates) == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5 * (0.2 + 0.8 / 2))
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(500, run) == pytest.approx(0.1)


@pytest.mark.parametrize(("name", "half", "last"), [("linear", 0.6, 0.2), ("constant", 1, 1)])
def test_schedules_begin_at_the_peak(name: str, half: float, last: float) -> None:
    run = config(max_steps=101, warmup_steps=0, lr=0.5, min_lr=0.2, lr_schedule=name)
    rates = [learning_rate(step, run) / run.lr for step in (0, 50, 100)]
    assert rates == pytest.approx([1, half, last])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(steps: int) -> None:
    for warmup in (0, 1, 5):
        run = config(max_steps=steps, warmup_steps=warmup)
        assert all(0 < learning_rate(step, run) <= run.lr for step in range(steps))
