"""Probabilities are those of transformers' rules; choices follow them, the seed and the text."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from longctx.model.sampling import Sampler

LOGITS = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.7, 5, None), (1.5, None, 0.9), (0.8, 20, 0.6), (1.0, 99, 1.0)],
)
def test_probabilities_are_those_of_transformers(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    rules = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    rules += [] if top_k is None else [TopKLogitsWarper(min(top_k, 50))]
    rules += [] if top_p is None else [TopPLogitsWarper(top_p)]
    logits = LOGITS
    for rule in rules:
        logits = rule(torch.zeros(3, 1, dtype=torch.int64), logits)
    expected = logits.softmax(-1)
    actual = Sampler(range(3), temperature, top_k, top_p).probabilities(LOGITS)
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected)


def test_choices_follow_the_probabilities() -> None:
    sampler = Sampler(range(4000), 0.8, top_k=6)
    logits = LOGITS[:1].expand(4000, -1)
    counts = torch.bincount(sampler(logits), minlength=50) / 4000
    p = sampler.probabilities(LOGITS[:1])[0]
    assert not counts[p == 0].any()
    assert (counts - p).abs().max() < 0.04  # five standard deviations


def test_a_text_is_chosen_alike_whatever_is_beside_it() -> None:
    together, alone = Sampler([0, 1, 2], 1.0, seed=5), Sampler([1], 1.0, seed=5)
    other = Sampler([1], 1.0, seed=6)
    beside = [together(LOGITS)[1].item() for _ in range(20)]
    assert beside == [alone(LOGITS[1:2]).item() for _ in range(20)]
    assert beside != [other(LOGITS[1:2]).item() for _ in range(20)]


def test_odd_logits_and_temperatures_choose_a_token_of_the_vocabulary() -> None:
    for logits in (torch.full((3, 5), math.nan), torch.full((3, 5), math.inf), LOGITS):
        for temperature in (1e-38, 0.8, 100.0):
            chosen = Sampler(range(3), temperature)(logits)
            assert ((chosen >= 0) & (chosen < logits.shape[-1])).all()
    assert Sampler([0], 1e-38)(torch.tensor([[50.0, 60.0, 1.0]])).item() == 1


def test_no_temperature_takes_the_likeliest() -> None:
    assert torch.equal(Sampler(range(3), 0.0)(LOGITS), LOGITS.argmax(-1))


def test_one_likeliest_token_is_always_chosen() -> None:
    for sampler in (Sampler(range(3), 2.0, top_k=1), Sampler(range(3), 2.0, top_p=1e-6)):
        assert torch.equal(sampler(LOGITS), LOGITS.argmax(-1))
