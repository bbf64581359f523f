"""Llama: heads of any size, shared or not, tied or not, with biases or without."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.model.families.parity import (
    ROPES,
    SIZES,
    check_defaults,
    check_keys,
    check_parity,
    stretched,
)

CASES = {
    "llama 2": LlamaConfig(**SIZES, num_key_value_heads=6),
    "llama 3": LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=10),
    "smollm2": LlamaConfig(**SIZES, num_key_value_heads=3, tie_word_embeddings=True),
    "biases": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("case", CASES)
def test_llama_computes_as_in_transformers_and_comes_back(case: str, tmp_path: Path) -> None:
    check_parity(CASES[case], tmp_path)


@pytest.mark.parametrize("rope", ROPES)
def test_stretched_llama_computes_as_in_transformers(rope: str, tmp_path: Path) -> None:
    config = LlamaConfig(**stretched(rope), num_key_value_heads=2)
    check_parity(config, tmp_path)


def test_missing_keys_of_llama_have_the_values_of_transformers(tmp_path: Path) -> None:
    check_defaults(LlamaConfig, tmp_path)


def test_unknown_keys_of_llama_are_refused_by_name(tmp_path: Path) -> None:
    check_keys(LlamaConfig, tmp_path)
