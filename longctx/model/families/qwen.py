"""Qwen2 and Qwen2.5, with biases in q, k and v and a tokenizer of their own; Qwen3, with norms on q
and k; Seed-OSS, with biases and heads of any size. Qwen's windows are in the upper layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import (
    Family,
    read_windows,
    register,
    windowed_layers,
    write_windows,
)

# How Qwen2 splits text, after NFC. transformers 5 opens every qwen2 model so, whatever its
# tokenizer.json says.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@register
class Qwen2(Family):
    """Biases in q, k and v always, in the output projection never."""

    model_type = "qwen2"
    class_name = "Qwen2"
    rank = 2
    defaults = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    }
    keys = ("use_sliding_window", "sliding_window", "max_window_layers")
    harmless = ("attention_bias",)
    features = ("qkv_bias", "window", "window_layers")

    def suits(self, config: GPTConfig) -> bool:
        return config.qkv_bias and not config.out_bias

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"qkv_bias": True, **read_qwen_windows(source, layers)}

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return write_qwen_windows(config)

    def check_tokenizer(self, file: Path) -> None:
        described = untrusted.read_settings(file, untrusted.TOKENIZER_SIZE)
        splitting = described.get("pre_tokenizer") or {}
        first = (splitting.get("pretokenizers") or [{}])[0]
        pattern = (first.get("pattern") or {}).get("Regex")
        if pattern != QWEN2_SPLIT or described.get("normalizer") != {"type": "NFC"}:
            raise ValueError(
                f"{file}: does not normalize and split text as Qwen2 does, but transformers opens "
                "a model with model.qkv_bias=true so: its tokens would be others"
            )


def read_qwen_windows(source: ConfigJson, layers: int) -> dict[str, Any]:
    """Windows as Qwen2 and Qwen3 name them: by layer_types, else from max_window_layers on."""

    def upper_layers() -> range:
        first = source.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool):
            raise source.error(f"max_window_layers={first!r} must be a whole number")
        return range(max(0, first), layers)

    return read_windows(source, layers, source.flag("use_sliding_window"), upper_layers)


def write_qwen_windows(config: GPTConfig) -> dict[str, Any]:
    """Windows by layer_types, and by max_window_layers for tools that do not know layer_types."""
    sliding = windowed_layers(config)
    keys = {"use_sliding_window": config.window is not None, **write_windows(config)}
    if sliding and sliding == list(range(sliding[0], config.layers)):
        keys["max_window_layers"] = sliding[0]
    return keys


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
        return config.qk_norm == "head"

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        biased = source.flag("attention_bias")
        windows = read_qwen_windows(source, layers)
        return {"qk_norm": "head", "qkv_bias": biased, "out_bias": biased, **windows}

    def check_features(self, config: GPTConfig) -> None:
        if config.out_bias != config.qkv_bias:
            raise self.cannot(config, "out_bias")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            **write_qwen_windows(config),
            "attention_bias": config.qkv_bias,
            "head_dim": config.head_size,
        }


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
