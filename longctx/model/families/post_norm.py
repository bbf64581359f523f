"""Families with a norm after each branch and none before it: OLMo 2 and 3, EXAONE 4.

OLMo normalizes all heads of q and k together. OLMo 3 has windows in three of four layers, and YaRN
stretches the others alone. In EXAONE 4 the layers without a window have no positions.
"""

from __future__ import annotations

from typing import Any, ClassVar

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import (
    Family,
    TwoRopes,
    read_windows,
    register,
    windowed_layers,
    write_windows,
)


@register
class Olmo2(Family):
    """One rope and no windows; biases in all of attention or nowhere."""

    model_type = "olmo2"
    class_name = "Olmo2"
    rank = 5
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    keys: ClassVar[tuple[str, ...]] = ("attention_bias",)
    features: ClassVar[tuple[str, ...]] = ("norms", "qk_norm", "qkv_bias", "out_bias")

    def suits(self, config: GPTConfig) -> bool:
        return config.norms == "post" and config.qk_norm == "whole"

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        biased = source.flag("attention_bias")
        block = {"norms": "post", "qk_norm": "whole", "qkv_bias": biased, "out_bias": biased}
        return block | self.read_kinds(source, layers)

    def read_kinds(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        """Return the windows."""
        return read_windows(source, layers, used=False, otherwise=list)

    def check_features(self, config: GPTConfig) -> None:
        if config.out_bias != config.qkv_bias:
            raise self.cannot(config, "out_bias")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        own_size = {} if config.head_dim is None else {"head_dim": config.head_size}
        return own_size | {"attention_bias": config.qkv_bias}


@register
class Olmo3(TwoRopes, Olmo2):
    """Windows in layers of layer_types, by default all but every fourth."""

    model_type = "olmo3"
    class_name = "Olmo3"
    rank = 6
    defaults = Olmo2.defaults | {"sliding_window": 4096}
    keys = (*Olmo2.keys, "sliding_window")
    features = (*Olmo2.features, "window", "window_layers", "window_rope_theta")
    thetas = 500_000.0, 500_000.0

    def suits(self, config: GPTConfig) -> bool:
        return super().suits(config) and config.window is not None

    def read_kinds(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        windowed = [n for n in range(layers) if (n + 1) % 4]
        return read_windows(source, layers, used=True, otherwise=lambda: windowed)

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_features(config) | write_windows(config)


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
    keys = ("sliding_window", "sliding_window_pattern")
    features = ("norms", "qk_norm", "nope_layers", "window", "window_layers")

    def suits(self, config: GPTConfig) -> bool:
        return config.norms == "post" and config.qk_norm == "head"

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        def local_layers() -> list[int]:
            every = source.size("sliding_window_pattern")
            return [n for n in range(layers) if (n + 1) % every]

        windows = read_windows(source, layers, used=True, otherwise=local_layers)
        windowed = windows.get("window_layers", ())
        if windowed is None or source.get("sliding_window") is None:
            unrotated = []
        else:
            unrotated = [n for n in range(layers) if n not in windowed]
        return {"norms": "post", "qk_norm": "head", "nope_layers": unrotated, **windows}

    def check_features(self, config: GPTConfig) -> None:
        full = sorted({*range(config.layers)} - {*windowed_layers(config)})
        if config.nope_layers != full and (config.window is not None or config.nope_layers):
            raise self.cannot(config, "nope_layers")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        own_size = {} if config.head_dim is None else {"head_dim": config.head_size}
        # A window without layers tells transformers to leave positions out
        window = config.window or (4096 if config.nope_layers else None)
        return own_size | write_windows(config) | {"sliding_window": window}
