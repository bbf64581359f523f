"""Families with a norm after each branch and none before it: OLMo 2 and 3, EXAONE 4.

OLMo normalizes all heads of q and k together. OLMo 3 has windows in three of four layers, and YaRN
stretches the others alone. In EXAONE 4 the layers without a window have no positions.
"""

from __future__ import annotations

from typing import Any, ClassVar

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, TwoRopes, register, windowed_layers


@register
class Olmo2(Family):
    """One rope and no windows; biases in all of attention or nowhere."""

    model_type = "olmo2"
    class_name = "Olmo2"
    rank = 5
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    fixed = {"norms": "post", "qk_norm": "whole"}
    flags = {"attention_bias": ("qkv_bias", "out_bias")}
    states_head_dim = False


@register
class Olmo3(TwoRopes, Olmo2):
    """Windows in layers of layer_types, by default all but every fourth."""

    model_type = "olmo3"
    class_name = "Olmo3"
    rank = 6
    defaults = Olmo2.defaults | {"sliding_window": 4096}
    features = ("window", "window_layers", "window_rope_theta")
    full_every = 4
    thetas = 500_000.0, 500_000.0

    def suits(self, config: GPTConfig) -> bool:
        return super().suits(config) and config.window is not None


@register
class Exaone4(Family):
    """No biases. Without sliding_window every layer sees the whole past and has positions."""

    model_type = "exaone4"
    class_name = "Exaone4"
    rank = 5
    defaults = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    fixed = {"norms": "post", "qk_norm": "head"}
    full_every = "sliding_window_pattern"
    keys = (full_every,)
    features = ("nope_layers", "window", "window_layers")
    states_head_dim = False

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        if source.get("sliding_window") is None:
            return {}
        windowed = self.read_windowed(source, layers)
        return {"nope_layers": [n for n in range(layers) if n not in windowed]}

    def check_features(self, config: GPTConfig) -> None:
        full = sorted({*range(config.layers)} - {*windowed_layers(config)})
        if config.nope_layers != full and (config.window is not None or config.nope_layers):
            raise self.cannot(config, "nope_layers")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        # A window without layers tells transformers to leave positions out
        default = self.defaults["sliding_window"] if config.nope_layers else None
        return {"sliding_window": config.window or default}
