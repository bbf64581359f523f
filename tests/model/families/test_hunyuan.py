"""HunYuan's dense models compute as in transformers: q and k are normalized after they rotate."""

from transformers import HunYuanDenseV1Config

from tests.model.families.parity import SIZES, SPECIAL, FamilyTests

GROUPED = {**SIZES, **SPECIAL, "num_key_value_heads": 2}
ALPHA = {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0}


class TestHunYuanDenseV1(FamilyTests):
    config_class = HunYuanDenseV1Config
    drawn = {"attention_bias": [False, True], "head_dim": [4, 10, 16]}
    cases = {
        "plain": HunYuanDenseV1Config(**GROUPED, head_dim=16),
        "biases": HunYuanDenseV1Config(
            **GROUPED, head_dim=8, attention_bias=True, tie_word_embeddings=True
        ),
        "alpha": HunYuanDenseV1Config(**GROUPED | {"rope_parameters": ALPHA}, head_dim=16),
    }
    special = SPECIAL
    stretched = {"num_key_value_heads": 2, "head_dim": 8}
    # its rope is written as the larger base that it is
    other_class = ("alpha",)
