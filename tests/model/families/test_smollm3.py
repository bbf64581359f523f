"""SmolLM3: layers without rotation, which have the windows too."""

from pathlib import Path

import pytest
from transformers import SmolLM3Config

from tests.model.families.parity import (
    ROPES,
    SIZES,
    SPECIAL,
    check_defaults,
    check_keys,
    check_parity,
    stretched,
)

CASES = {
    "plain": SmolLM3Config(**SIZES, num_key_value_heads=3, no_rope_layer_interval=2, **SPECIAL),
    "windows": SmolLM3Config(
        **SIZES | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=7,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        **SPECIAL,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_smollm3_computes_as_in_transformers_and_comes_back(case: str, tmp_path: Path) -> None:
    check_parity(CASES[case], tmp_path)


@pytest.mark.parametrize(
    "rope",
    [rope if rope == "yarn" else pytest.param(rope, marks=pytest.mark.slow) for rope in ROPES],
)
def test_stretched_smollm3_computes_as_in_transformers(rope: str, tmp_path: Path) -> None:
    config = SmolLM3Config(
        **stretched(rope), num_key_value_heads=2, no_rope_layers=[1, 0], **SPECIAL
    )
    check_parity(config, tmp_path)


def test_missing_keys_of_smollm3_have_the_values_of_transformers(tmp_path: Path) -> None:
    check_defaults(SmolLM3Config, tmp_path, SPECIAL)


def test_unknown_keys_of_smollm3_are_refused_by_name(tmp_path: Path) -> None:
    check_keys(SmolLM3Config, tmp_path)
