"""Qwen2: biases in q, k and v, and windows in the upper layers."""

from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.model.families.parity import (
    ROPES,
    SIZES,
    check_defaults,
    check_keys,
    check_parity,
    stretched,
)

CASES = {
    "plain": Qwen2Config(**SIZES, num_key_value_heads=2),
    "tied": Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "half windowed": Qwen2Config(
        **SIZES,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=11,
        max_window_layers=1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_qwen2_computes_as_in_transformers_and_comes_back(case: str, tmp_path: Path) -> None:
    check_parity(CASES[case], tmp_path)


@pytest.mark.parametrize(
    "rope",
    [rope if rope == "yarn" else pytest.param(rope, marks=pytest.mark.slow) for rope in ROPES],
)
def test_stretched_qwen2_computes_as_in_transformers(rope: str, tmp_path: Path) -> None:
    config = Qwen2Config(**stretched(rope), num_key_value_heads=2)
    check_parity(config, tmp_path)


def test_missing_keys_of_qwen2_have_the_values_of_transformers(tmp_path: Path) -> None:
    check_defaults(Qwen2Config, tmp_path)


def test_unknown_keys_of_qwen2_are_refused_by_name(tmp_path: Path) -> None:
    check_keys(Qwen2Config, tmp_path)
