"""Qwen3: norms on q and k, and windows in the layers that layer_types names."""

from pathlib import Path

import pytest
from transformers import Qwen3Config

from tests.model.families.parity import (
    ROPES,
    SIZES,
    check_defaults,
    check_keys,
    check_parity,
    stretched,
)

CASES = {
    "plain": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "tied": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    "layer types": Qwen3Config(
        **SIZES | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_qwen3_computes_as_in_transformers_and_comes_back(case: str, tmp_path: Path) -> None:
    check_parity(CASES[case], tmp_path)


@pytest.mark.parametrize(
    "rope",
    [rope if rope == "yarn" else pytest.param(rope, marks=pytest.mark.slow) for rope in ROPES],
)
def test_stretched_qwen3_computes_as_in_transformers(rope: str, tmp_path: Path) -> None:
    config = Qwen3Config(**stretched(rope), num_key_value_heads=2, head_dim=8)
    check_parity(config, tmp_path)


def test_missing_keys_of_qwen3_have_the_values_of_transformers(tmp_path: Path) -> None:
    check_defaults(Qwen3Config, tmp_path)


def test_unknown_keys_of_qwen3_are_refused_by_name(tmp_path: Path) -> None:
    check_keys(Qwen3Config, tmp_path)
