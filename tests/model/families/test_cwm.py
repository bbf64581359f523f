"""CWM: windows by its own pattern or by layer_types, and positions stretched by default."""

from typing import Any

from transformers import CwmConfig

from tests.model.families.parity import SIZES, SPECIAL, FamilyTests

IDS = SPECIAL | {"bos_token_id": 1}
SMALL: dict[str, Any] = {**SIZES, **IDS, "num_key_value_heads": 2, "sliding_window": 9}


class TestCwm(FamilyTests):
    config_class = CwmConfig
    cases = {
        "own pattern": CwmConfig(**SMALL | {"num_hidden_layers": 6}, head_dim=16),
        "own rope": CwmConfig(**SMALL | {"rope_parameters": None}, head_dim=16),
        "layer types": CwmConfig(
            **SMALL, head_dim=8, layer_types=["sliding_attention", "full_attention"]
        ),
    }
    # as the Ministral that it is
    other_class = (*cases, "stretched")
    special = IDS
    stretched = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 40}
