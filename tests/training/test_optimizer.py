"""Which parameters decay, what the learning rate is at every step, and what clipping does."""

import math

import pytest
import torch

from longctx.model import GPT, GPTConfig
from longctx.training.config import TrainConfig, complete
from longctx.training.optimizer import adamw, clip_gradients, learning_rate


def config(**changes: object):
    return complete(TrainConfig(**changes), "cpu")  # type: ignore[arg-type]


def test_matrices_decay_and_vectors_do_not() -> None:
    model = GPT(GPTConfig(vocab_size=40, layers=2, qkv_bias=True, qk_norm=True))
    decayed, free = adamw(model, config(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim == 2 for p in decayed["params"])
    assert all(p.ndim == 1 for p in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))


def test_the_rate_rises_linearly_and_falls_as_a_cosine_to_its_floor() -> None:
    run = config(max_steps=101, warmup_steps=10, lr=0.5, min_lr=0.2)
    rates = [learning_rate(step, run) for step in range(101)]
    assert rates[:10] == pytest.approx([0.05 * n for n in range(1, 11)])
    assert max(rates) == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5 * (0.2 + 0.8 / 2))
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(500, run) == pytest.approx(0.1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(steps: int) -> None:
    for warmup in (0, 1, 5):
        run = config(max_steps=steps, warmup_steps=warmup)
        assert all(0 < learning_rate(step, run) <= run.lr for step in range(steps))


def test_clipping_returns_the_norm_before_it() -> None:
    layer = torch.nn.Linear(3, 5)
    for p in layer.parameters():
        p.grad = torch.full_like(p, 2.0)
    before = math.sqrt(20 * 4.0)
    assert float(clip_gradients(layer, None)) == pytest.approx(before)
    assert float(layer.bias.grad[0]) == 2.0  # type: ignore[index]
    assert float(clip_gradients(layer, 1.0)) == pytest.approx(before)
    after = torch.cat([p.grad.flatten() for p in layer.parameters()]).norm()  # type: ignore[union-attr]
    assert float(after) == pytest.approx(1.0, rel=1e-4)
