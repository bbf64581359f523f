"""Granite computes as in transformers, with its four factors."""

from typing import Any

from transformers import GraniteConfig

from tests.model.families.parity import SIZES, SPECIAL, FamilyTests

FACTORS: dict[str, Any] = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    **{"attention_multiplier": 0.2, "logits_scaling": 49.0},
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
