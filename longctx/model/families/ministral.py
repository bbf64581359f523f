"""Ministral: Mistral with a window in the layers that layer_types names.

transformers saves a Mistral folder with layer_types as Ministral.
"""

from __future__ import annotations

from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.model.families.family import register, write_windows
from longctx.model.families.mistral import Mistral


@register
class Ministral(Mistral):
    """No biases; a window in some layers."""

    model_type = "ministral"
    class_name = "Ministral"
    rank = 2
    features = ("window", "window_layers")

    def suits(self, config: GPTConfig) -> bool:
        return config.window_layers is not None and not config.qkv_bias

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {**write_windows(config), "head_dim": config.head_size}
