"""Llama 1 to 3, SmolLM 1 and 2, and all that goes by their name: the plain case."""

from __future__ import annotations

from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, read_windows, register


@register
class Llama(Family):
    """No windows; biases in attention (all four) or the MLP (all three) or neither."""

    model_type = "llama"
    class_name = "Llama"
    rank = 0
    defaults = {"max_position_embeddings": 2048}
    keys = ("attention_bias", "mlp_bias")
    features = ("qkv_bias", "out_bias", "mlp_bias")

    def suits(self, config: GPTConfig) -> bool:
        return True

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        biased = source.flag("attention_bias")
        mlp_bias = source.flag("mlp_bias")
        windows = read_windows(source, layers, used=False, otherwise=list)
        return {"qkv_bias": biased, "out_bias": biased, "mlp_bias": mlp_bias, **windows}

    def check_features(self, config: GPTConfig) -> None:
        if config.out_bias != config.qkv_bias:
            raise self.cannot(config, "out_bias")
        if config.channels % config.heads:
            raise ValueError(
                f"model.channels={config.channels} with model.heads={config.heads}: "
                "Llama wants a multiple of the heads"
            )

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "attention_bias": config.qkv_bias,
            "mlp_bias": config.mlp_bias,
            "head_dim": config.head_size,
        }
