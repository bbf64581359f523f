"""Granite computes as in transformers, with its four factors."""

from pathlib import Path

import pytest
from transformers import GraniteConfig, GraniteSWAConfig

from longctx.model.huggingface import read_config
from tests.model.families.parity import SPECIAL, FamilyTests

DRAWN = {
    **{"embedding_multiplier": [1.0, 12], "residual_multiplier": [1.0, 0.22]},
    **{"attention_multiplier": [0.2, 0.4], "logits_scaling": [3.0, 7]},
    **{"attention_bias": [False, True], "mlp_bias": [False, True]},
}
# Layers 0 and 4 have no window; 0 stands for no positions
BASES = [[0, 300.0, 300.0, 300.0, 0], [300.0, 0, 0, 0, 300.0], [5e5, 300.0, 300.0, 300.0, 5e5]]


class TestGranite(FamilyTests):
    config_class = GraniteConfig
    special = SPECIAL
    drawn = {**DRAWN, "head_dim": [8, 10]}


class TestGraniteSWA(FamilyTests):
    config_class = GraniteSWAConfig
    rewritten = ("rope_parameters",)  # a base that no layer has
    special = SPECIAL
    drawn = {
        **{**DRAWN, "sliding_window": [3, 8, 20], "num_hidden_layers": [5]},
        **{"layer_rope_theta": BASES},
    }
    stretched = {"sliding_window": 40, "layer_rope_theta": None}


def test_two_bases_of_one_kind_are_refused(tmp_path: Path) -> None:
    thetas = [100.0, 300.0, 300.0, 500.0]
    changes = {"num_hidden_layers": 4, "layer_rope_theta": thetas}
    TestGraniteSWA().config(0, **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layer_rope_theta=\[100.* is not covered yet"):
        read_config(tmp_path)
