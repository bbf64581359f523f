"""Mistral and its relatives: Llama without biases and with sliding windows.

Mistral has a window in every layer, Ministral in the layers of layer_types, CWM in all but each
fourth. transformers saves a Mistral folder with layer_types as Ministral.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from longctx.config.model_config import GPTConfig
from longctx.config.rope_config import ORIGINAL
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register


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
    harmless = ("use_sliding_window",)
    features: ClassVar[tuple[str, ...]] = ("window",)

    def suits(self, config: GPTConfig) -> bool:
        return config.window is not None and not config.qkv_bias


@register
class Ministral(Mistral):
    """No biases; a window in some layers."""

    model_type = "ministral"
    class_name = "Ministral"
    rank = 2
    features = ("window", "window_layers")

    def suits(self, config: GPTConfig) -> bool:
        return config.window_layers is not None and not config.qkv_bias


CWM_THETA = 1_000_000.0
CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": CWM_THETA,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 8192,
}


@register
class Cwm(Ministral):
    """A family to read only: Ministral or Llama computes the same, and they write it."""

    model_type = "cwm"
    class_name = "Cwm"
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": CWM_THETA,
        "sliding_window": 8192,
    }
    rope = CWM_ROPE

    def suits(self, config: GPTConfig) -> bool:
        return False

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        return [n for n in range(layers) if n % 4]
