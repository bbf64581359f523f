"""Llama 1 to 3 and all that goes by their name; SmolLM3, with layers without rotary positions."""

from __future__ import annotations

import json
from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, read_windows, register, write_windows


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


@register
class SmolLM3(Family):
    """Layers without rotation; windows in any layers; biases as in Llama."""

    model_type = "smollm3"
    class_name = "SmolLM3"
    rank = 3
    defaults = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }
    keys = (
        "attention_bias",
        "mlp_bias",
        "no_rope_layers",
        "no_rope_layer_interval",
        "use_sliding_window",
        "sliding_window",
    )
    features = ("nope_layers", "qkv_bias", "out_bias", "mlp_bias", "window", "window_layers")

    def suits(self, config: GPTConfig) -> bool:
        some_windowed = config.window_layers is not None
        is_biased = config.mlp_bias and not config.qkv_bias
        return bool(config.nope_layers) or (some_windowed and is_biased)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        biased = source.flag("attention_bias")
        unrotated = read_unrotated(source, layers)
        used = source.flag("use_sliding_window")
        return {
            "nope_layers": unrotated,
            "qkv_bias": biased,
            "out_bias": biased,
            "mlp_bias": source.flag("mlp_bias"),
            **read_windows(source, layers, used, otherwise=lambda: unrotated),
        }

    def check_features(self, config: GPTConfig) -> None:
        if config.out_bias != config.qkv_bias:
            raise self.cannot(config, "out_bias")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        keys = {
            "use_sliding_window": config.window is not None,
            **write_windows(config),
            "attention_bias": config.qkv_bias,
            "mlp_bias": config.mlp_bias,
            "no_rope_layers": [int(n not in config.nope_layers) for n in range(config.layers)],
        }
        if config.head_dim is not None:
            keys["head_dim"] = config.head_size
        return keys


def read_unrotated(source: ConfigJson, layers: int) -> list[int]:
    """The layers without rotation: those with 0 in no_rope_layers, by default every fourth."""
    flags = source.get("no_rope_layers")
    if flags is None:
        every = source.with_defaults({"no_rope_layer_interval": 4}).size("no_rope_layer_interval")
        return list(range(every - 1, layers, every))
    is_list = isinstance(flags, list) and len(flags) >= layers
    if not is_list or any(flag not in (0, 1) for flag in flags):
        raise source.error(
            f"no_rope_layers={json.dumps(flags)[:80]} must be a list of {layers} times 0 or 1"
        )
    return [n for n in range(layers) if not flags[n]]
