"""SmolLM3: layers without rotation, which have the windows too."""

from transformers import SmolLM3Config

from tests.model.families.parity import SIZES, SPECIAL, FamilyTests


class TestSmolLM3(FamilyTests):
    config_class = SmolLM3Config
    cases = {
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
    stretched = {"num_key_value_heads": 2, "no_rope_layers": [1, 0]}
    special = SPECIAL
