"""Ministral: windows in the layers that layer_types names, or in all."""

from transformers import MinistralConfig

from tests.model.families.parity import SIZES, FamilyTests

GROUPED = {**SIZES, "num_key_value_heads": 2}


class TestMinistral(FamilyTests):
    config_class = MinistralConfig
    cases = {
        "layer types": MinistralConfig(
            **GROUPED,
            head_dim=16,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "all windowed": MinistralConfig(**GROUPED, head_dim=8, sliding_window=9),
    }
    stretched = {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 40,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    # as the Mistral that it is
    other_class = ("all windowed",)
