"""Granite computes as in transformers, with its four factors."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GraniteConfig, GraniteSWAConfig

from longctx.model.huggingface import read_config
from tests.model.families.parity import SIZES, SPECIAL, FamilyTests

FACTORS: dict[str, Any] = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    **{"attention_multiplier": 0.2, "logits_scaling": 49.0},
}
DRAWN = {
    **{"embedding_multiplier": [1.0, 12], "residual_multiplier": [1.0, 0.22]},
    **{"attention_multiplier": [0.2, 0.4], "logits_scaling": [3.0, 7]},
    **{"attention_bias": [False, True], "mlp_bias": [False, True]},
}
GROUPED = {**SIZES, **SPECIAL, "num_key_value_heads": 2}


class TestGranite(FamilyTests):
    config_class = GraniteConfig
    cases = {
        "factors": GraniteConfig(**GROUPED, **FACTORS),
        "none given": GraniteConfig(**GROUPED, tie_word_embeddings=True),
        "biases": GraniteConfig(**GROUPED, **FACTORS, attention_bias=True, mlp_bias=True),
        "own head size": GraniteConfig(**GROUPED, **FACTORS, head_dim=10),
    }
    special = SPECIAL
    stretched = {"num_key_value_heads": 2, **FACTORS}
    drawn = DRAWN


def swa(layers: int, theta: float = 5000.0, **changes: Any) -> GraniteSWAConfig:
    rope = {"rope_type": "default", "rope_theta": theta}
    keys = {**GROUPED, **FACTORS, "num_hidden_layers": layers, "rope_parameters": rope}
    return GraniteSWAConfig(**keys | changes)


class TestGraniteSWA(FamilyTests):
    config_class = GraniteSWAConfig
    cases = {
        "windows": swa(5, sliding_window=7),
        "bases": swa(5, 5e5, sliding_window=7, layer_rope_theta=[0, 300.0, 300.0, 300.0, 5e5]),
        "no positions in windows": swa(3, 300.0, sliding_window=9, layer_rope_theta=[300.0, 0, 0]),
        "no windows": swa(
            2, sliding_window=128, layer_types=["full_attention"] * 2, attention_bias=True
        ),
    }
    special = SPECIAL
    stretched = {"num_key_value_heads": 2, "sliding_window": 40, **FACTORS}
    drawn = {**DRAWN, "sliding_window": [3, 8, 20]}


def test_two_bases_of_one_kind_are_refused(tmp_path: Path) -> None:
    thetas = [100.0, 300.0, 300.0, 500.0]
    swa(4, sliding_window=7, layer_rope_theta=thetas).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layer_rope_theta=\[100.* is not covered yet"):
        read_config(tmp_path)
