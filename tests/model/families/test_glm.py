"""GLM-4 computes as in transformers: sandwich norms, interleaved pairs, half of a head rotates."""

from copy import deepcopy
from typing import Any

from transformers import Glm4Config

from tests.model.families.parity import SIZES, SPECIAL, FamilyTests


def config(share: float, **changes: Any) -> Glm4Config:
    keys = deepcopy(SIZES) | SPECIAL | {"num_key_value_heads": 2, "head_dim": 8} | changes
    return Glm4Config(**keys, partial_rotary_factor=share)


class TestGlm4(FamilyTests):
    config_class = Glm4Config
    cases = {
        "half rotates": config(0.5),
        "all rotates": config(1.0),
        "without biases": config(0.5, attention_bias=False, tie_word_embeddings=True),
        "own head size": config(0.25, head_dim=16),
    }
    special = SPECIAL
    stretched = {"num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.5}
    drawn = {
        **{"head_dim": [8, 16], "partial_rotary_factor": [0.25, 0.5, 1.0]},
        "attention_bias": [False, True],
    }
