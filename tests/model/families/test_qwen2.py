"""Qwen2: biases in q, k and v, and windows in the upper layers."""

from transformers import Qwen2Config

from tests.model.families.parity import SIZES, FamilyTests


class TestQwen2(FamilyTests):
    config_class = Qwen2Config
    cases = {
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
    stretched = {"num_key_value_heads": 2}
