"""Rotary embedding: transformers' frequencies, exact angles far out, scores that depend on distance alone."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longctx.model.rope import Rope, rotate


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10000.0), (10, 10000.0), (64, 500000.0), (128, 1e6)])
def test_frequencies_are_those_of_transformers(head_dim: int, theta: float) -> None:
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    assert torch.equal(Rope(head_dim, theta).frequencies, LlamaRotaryEmbedding(config).inv_freq)


def test_cos_and_sin_are_right_at_a_million_positions() -> None:
    rope = Rope(64, 500000.0)
    position = 1_000_003
    cos, sin = rope(torch.tensor([[position]]))
    for d, frequency in enumerate(rope.frequencies.double().tolist()):
        assert cos[0, 0, 0, d].item() == pytest.approx(math.cos(position * frequency), abs=1e-7)
        assert sin[0, 0, 0, d].item() == pytest.approx(math.sin(position * frequency), abs=1e-7)


def test_scores_depend_on_distance_alone() -> None:
    rope = Rope(16, 10000.0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind(0)

    def score(i: int, j: int) -> float:
        return (rotate(q, *rope(torch.tensor([[i]]))) * rotate(k, *rope(torch.tensor([[j]])))).sum().item()

    for shift in (1, 1000, 999_983):
        assert score(7 + shift, 3 + shift) == pytest.approx(score(7, 3), abs=1e-5)


def test_frequencies_stay_fp32_in_a_16_bit_module() -> None:
    rope = Rope(8, 10000.0).bfloat16()
    cos, _ = rope(torch.arange(4)[None])
    assert rope.frequencies.dtype == cos.dtype == torch.float32
    x = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    assert rotate(x, *rope(torch.arange(4)[None])).dtype == torch.bfloat16
