"""The learning rate of every step: warm-up, schedule, floor."""

import math

import pytest
from torch import nn, optim
from transformers import get_inverse_sqrt_schedule

import train
from longctx.config.train_config import TrainConfig
from tests.training.sample_run import check_equal_weights, losses, sample_run, steps


def config(**changes: object):
    return sample_run(TrainConfig(**changes))


def check(**changes: object) -> None:
    run = config(**changes)
    run.schedule.check(run.config)


def as_in_transformers(step: int) -> float:
    """Return the share of a step after a warm-up of ten; theirs are counted from the one before."""
    optimizer = optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    return get_inverse_sqrt_schedule(optimizer, 10).lr_lambdas[0](step + 1)


FLOOR = {"min_lr_ratio": 0.2}
LINEAR = {"lr_decay_from": 70, "lr_decay_shape": "linear"}


@pytest.mark.parametrize(
    ("name", "keys", "share"),
    [
        ("cosine", FLOOR, lambda n: 0.2 + 0.4 * (1 + math.cos(math.pi * (n - 10) / 90))),
        ("linear", FLOOR, lambda n: 1 - 0.8 * (n - 10) / 90),
        ("constant", FLOOR, lambda n: 1),
        ("inverse_sqrt", {}, as_in_transformers),
        ("wsd", {}, lambda n: 1 - 0.9 * (max(0, n - 80) / 20) ** 0.5),
        ("wsd", LINEAR | FLOOR, lambda n: 1 - 0.8 * max(0, n - 69) / 31),
        ("wsd", {"lr_decay_share": 0.3} | FLOOR, lambda n: 1 - 0.8 * (max(0, n - 70) / 30) ** 0.5),
    ],
)
def test_the_rate_rises_linearly_then_follows_its_formula(name, keys, share):
    run = config(max_steps=101, warmup_steps=10, lr=0.5, lr_schedule=name, **keys)
    rates = [run.schedule.rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.05 * n for n in range(1, 11)])
    assert rates[10:] == pytest.approx([0.5 * share(n) for n in range(10, 101)])
    assert run.schedule.rate(500) == rates[-1]
    if name == "wsd":
        assert run.settings()["min_lr_ratio"] == keys.get("min_lr_ratio", 0.1)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(count, name):
    for warmup in (0, 1, 5):
        run = config(max_steps=count, warmup_steps=warmup, lr_schedule=name)
        assert all(0 < run.schedule.rate(step) <= run.lr for step in range(count))
        assert warmup > 1 or count == 1 or run.schedule.rate(0) == run.lr


@pytest.mark.parametrize("start", [4, 20])
def test_a_decay_within_the_run_and_after_its_warm_up(start):
    keys = {"lr_schedule": "wsd", "max_steps": 20, "warmup_steps": 5}
    with pytest.raises(ValueError, match=f"lr_decay_from={start}: give a number from"):
        check(lr_decay_from=start, **keys)
    check(lr_decay_from=5, **keys)


def test_a_warm_up_of_a_new_run_ends_within_it():
    with pytest.raises(ValueError, match="warmup_steps=100: max_steps=10 would end below lr"):
        check(warmup_steps=100, max_steps=10)
    check(warmup_steps=100, max_steps=10, resume="runs/longer")


def test_a_decay_begins_at_a_checkpoint_of_the_stable_part(overrides, tmp_path, refused, capsys):
    runs, keys = tmp_path / "runs", {"warmup_steps": 2, "lr": 0.01, "checkpoint_every": 3}
    decay = ["lr_schedule=wsd", "lr_decay_from=6", "lr_decay_shape=linear", "max_steps=10"]
    given = [word for word in overrides(**keys) if not word.startswith("max_steps")]
    assert train.main([*given, "name=whole", *decay, "min_lr_ratio=0"]) == 0
    assert train.main([*given, "name=cut", "max_steps=6", "lr_schedule=constant"]) == 0
    resume = [f"resume={runs / 'cut'}", "lr_schedule=wsd", "min_lr_ratio=0"]
    capsys.readouterr()
    refused(train.main([*resume, "max_steps=7", "lr_decay_share=0.5"]), "give lr_schedule=wsd")
    assert train.main([*resume, *decay[1:]]) == 0
    assert losses(runs / "cut") == losses(runs / "whole")
    check_equal_weights(runs / "cut", runs / "whole")
    rates = [row["lr"] for row in steps(runs / "cut")]
    assert rates == pytest.approx([0.005, *[0.01] * 5, 0.0075, 0.005, 0.0025, 0])
