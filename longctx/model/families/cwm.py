"""CWM: Llama 3 with a window in every layer but each fourth, the first among those without."""

from __future__ import annotations

from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.config.rope_config import ORIGINAL
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, read_windows, register

THETA = 1_000_000.0
ROPE = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 8192,
}


@register
class Cwm(Family):
    """A family to read only: Ministral or Llama computes the same, and they write it."""

    model_type = "cwm"
    class_name = "Cwm"
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "sliding_window": 8192,
    }
    keys = ("sliding_window",)
    harmless = ("use_sliding_window",)

    def suits(self, config: GPTConfig) -> bool:
        return False

    def read(self, source: ConfigJson) -> GPTConfig:
        if source.get("rope_parameters") is None:
            source = ConfigJson(source.file, source.keys | {"rope_parameters": ROPE})
        return super().read(source)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        windowed = [n for n in range(layers) if n % 4]
        return read_windows(source, layers, used=True, otherwise=lambda: windowed)
