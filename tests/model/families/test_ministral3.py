"""Ministral 3 computes as in transformers: queries grow with their position."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import Ministral3Config

from longctx.model.huggingface import read_config
from tests.model.families.parity import OLD, ROPES, SIZES, SPECIAL, FamilyTests

GROWTH = {"llama_4_scaling_beta": 0.3, OLD: 32}
ROPE = {"rope_theta": 5000.0, **ROPES["yarn"], **GROWTH}


def config(**changes: Any) -> Ministral3Config:
    keys = SIZES | SPECIAL | {"num_key_value_heads": 2, "head_dim": 8}
    return Ministral3Config(**keys | {"rope_parameters": dict(ROPE)} | changes)


class TestMinistral3(FamilyTests):
    config_class = Ministral3Config
    cases = {
        "plain": config(),
        "window": config(sliding_window=40, head_dim=16),
        "tied": config(tie_word_embeddings=True),
    }
    special = SPECIAL
    stretched = {"num_key_value_heads": 2, "head_dim": 8}
    drawn = {"head_dim": [4, 8, 18], "sliding_window": [None, 5, 20]}

    def rope_keys(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        return super().rope_keys({**rope, **GROWTH})


def test_without_growth_it_is_refused(tmp_path: Path) -> None:
    content = {**SIZES, "model_type": "ministral3", "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"llama_4_scaling_beta=0\.0 must be a number above 0"):
        read_config(tmp_path)
