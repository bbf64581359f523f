"""Qwen3: Llama with RMSNorm on every head of q and k, and Qwen2's windows."""

from __future__ import annotations

from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register
from longctx.model.families.qwen2 import read_qwen_windows, write_qwen_windows


@register
class Qwen3(Family):
    """Norms on q and k always; biases in all of attention or nowhere."""

    model_type = "qwen3"
    class_name = "Qwen3"
    rank = 4
    defaults = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "sliding_window": 4096,
    }
    keys = ("attention_bias", "use_sliding_window", "sliding_window", "max_window_layers")
    features = ("qk_norm", "qkv_bias", "out_bias", "window", "window_layers")

    def suits(self, config: GPTConfig) -> bool:
        return config.qk_norm

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        biased = source.flag("attention_bias")
        windows = read_qwen_windows(source, layers)
        return {"qk_norm": True, "qkv_bias": biased, "out_bias": biased, **windows}

    def check_features(self, config: GPTConfig) -> None:
        if config.out_bias != config.qkv_bias:
            raise self.cannot(config, "out_bias")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            **write_qwen_windows(config),
            "attention_bias": config.qkv_bias,
            "head_dim": config.head_size,
        }
