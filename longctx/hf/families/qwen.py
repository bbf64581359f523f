"""Qwen2 and Qwen2.5, with biases in q, k and v and a tokenizer of their own; Qwen3, with norms on q
and k; Seed-OSS, with biases and heads of any size. Qwen's windows are in the upper layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longctx import untrusted
from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family, register

# How Qwen2 splits text, after NFC. transformers 5 opens every qwen2 model so, whatever its
# tokenizer.json says.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


class UpperWindows(Family):
    """Windows by layer_types, else in the layers from max_window_layers on."""

    keys = ("use_sliding_window", "max_window_layers", "sliding_window", "layer_types")

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        return range(max(0, source.get("max_window_layers", 28)), layers)


@register
class Qwen2(UpperWindows):
    """Biases in q, k and v always, in the output projection never."""

    model_type = "qwen2"
    class_name = "Qwen2"
    defaults = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    }
    fixed = {"qkv_bias": True, "out_bias": False}
    harmless = ("attention_bias",)

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
    """Biases as config.json says, and heads of any size."""

    model_type = "seed_oss"
    class_name = "SeedOss"
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
