"""Qwen3: norms on q and k, and windows in the layers that layer_types names."""

from transformers import Qwen3Config

from tests.model.families.parity import SIZES, FamilyTests


class TestQwen3(FamilyTests):
    config_class = Qwen3Config
    cases = {
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
    stretched = {"num_key_value_heads": 2, "head_dim": 8}
