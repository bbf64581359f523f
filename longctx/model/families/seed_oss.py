"""Seed-OSS: Llama with heads of any size and biases in q, k and v."""

from __future__ import annotations

from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register


@register
class SeedOss(Family):
    """Biases as config.json says. If heads have channels / heads channels, Qwen2 writes it."""

    model_type = "seed_oss"
    class_name = "SeedOss"
    rank = 3
    defaults = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "head_dim": 128,
    }
    keys = ("attention_bias", "attention_out_bias", "mlp_bias")
    harmless = ("residual_dropout",)
    features = ("qkv_bias", "out_bias", "mlp_bias")

    def suits(self, config: GPTConfig) -> bool:
        is_own_size = config.head_size * config.heads != config.channels
        return is_own_size and config.qkv_bias and not config.out_bias

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        source.layer_types(layers, sliding=False)
        return {
            "qkv_bias": source.flag("attention_bias"),
            "out_bias": source.flag("attention_out_bias"),
            "mlp_bias": source.flag("mlp_bias"),
        }

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "attention_bias": config.qkv_bias,
            "attention_out_bias": config.out_bias,
            "mlp_bias": config.mlp_bias,
            "head_dim": config.head_size,
            "residual_dropout": 0.0,
        }
