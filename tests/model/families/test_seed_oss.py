"""Seed-OSS: heads of any size, with biases in q, k and v, or others."""

from transformers import SeedOssConfig

from tests.model.families.parity import SIZES, SPECIAL, FamilyTests

WITHOUT_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}  # as exports are
GROUPED = {**SIZES, **SPECIAL, **WITHOUT_DROPOUT, "num_key_value_heads": 2}


class TestSeedOss(FamilyTests):
    config_class = SeedOssConfig
    cases = {
        "plain": SeedOssConfig(**GROUPED, head_dim=16),
        "bias in the MLP": SeedOssConfig(**GROUPED, head_dim=10, mlp_bias=True),
        "all biased": SeedOssConfig(**GROUPED, head_dim=16, attention_out_bias=True),
        "heads of channels / heads": SeedOssConfig(**GROUPED, head_dim=8),
    }
    special = SPECIAL
    stretched = WITHOUT_DROPOUT | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    # as the Llama and the Qwen2 that they are
    other_class = ("all biased", "heads of channels / heads")
