"""Qwen2 and Qwen2.5, with biases in q, k and v and a tokenizer of their own; Qwen3, with norms on q
and k; Seed-OSS, with biases and heads of any size. Qwen's windows are in the upper layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family, register, windowed_layers
from longctx.spec.model_config import GPTConfig

# How Qwen2 splits text, after NFC. transformers 5 opens every qwen2 model so, whatever its
# tokenizer.json says.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


class UpperWindows(Family):
    """Windows by layer_types, else in the layers from max_window_layers on."""

    keys = ("use_sliding_window", "max_window_layers")
    features = ("window", "window_layers")

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        return range(max(0, source.get("max_window_layers", 28)), layers)

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        # For tools that do not know layer_types
        windowed = windowed_layers(config)
        is_upper = windowed and windowed == list(range(windowed[0], config.layers))
        return {"max_window_layers": windowed[0]} if is_upper else {}


@register
class Qwen2(UpperWindows):
    """Biases in q, k and v always, in the output projection never."""

    model_type = "qwen2"
    class_name = "Qwen2"
    rank = 2
    defaults = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    }
    fixed = {"qkv_bias": True, "out_bias": False}
    harmless = ("attention_bias",)
    states_head_dim = False

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


@register
class Qwen3(UpperWindows):
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
    fixed = {"qk_norm": "head"}
    flags = {"attention_bias": ("qkv_bias", "out_bias")}


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
    flags = {
        "attention_bias": ("qkv_bias",),
        "attention_out_bias": ("out_bias",),
        "mlp_bias": ("mlp_bias",),
    }
    harmless = ("residual_dropout",)

    def suits(self, config: GPTConfig) -> bool:
        is_own_size = config.head_size * config.heads != config.channels
        return is_own_size and config.qkv_bias and not config.out_bias

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {"residual_dropout": 0.0}
