"""Qwen2 and Qwen2.5: Llama with biases in q, k and v, windows in the layers above the first few,
and a tokenizer of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson, read_json
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
        described = read_json(file, untrusted.TOKENIZER_SIZE)
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
