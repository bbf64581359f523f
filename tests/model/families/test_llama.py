"""Llama: heads of any size, shared or not, tied or not, with biases or without."""

from transformers import LlamaConfig

from tests.model.families.parity import ROPES, SIZES, FamilyTests


class TestLlama(FamilyTests):
    config_class = LlamaConfig
    cases = {
        "llama 2": LlamaConfig(**SIZES, num_key_value_heads=6),
        "llama 3": LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=10),
        "smollm2": LlamaConfig(**SIZES, num_key_value_heads=3, tie_word_embeddings=True),
        "biases": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    }
    stretched = {"num_key_value_heads": 2}
    fast_ropes = tuple(ROPES)
