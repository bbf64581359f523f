"""Mistral: Llama without biases and with a sliding window in every layer.

With layer_types in its config.json only the layers named there slide (see ministral.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, read_windows, register


@register
class Mistral(Family):
    """No biases; one window."""

    model_type = "mistral"
    class_name = "Mistral"
    rank = 1
    defaults = {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }
    keys = ("sliding_window",)
    harmless = ("use_sliding_window",)
    features: ClassVar[tuple[str, ...]] = ("window",)

    def suits(self, config: GPTConfig) -> bool:
        return config.window is not None and not config.qkv_bias

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return read_windows(source, layers, used=True, otherwise=lambda: range(layers))

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {"sliding_window": config.window, "head_dim": config.head_size}
