"""Granite 3 and 4: Llama with factors of embedding, branches, scores and logits; Granite SWA, with
sinks and windows too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family, register, windowed_layers
from longctx.hf.families.llama import BIASES
from longctx.spec.model_config import GPTConfig, Multipliers


@register
class Granite(Family):
    """No windows; biases in attention (all four) or the MLP (all three) or neither."""

    model_type = "granite"
    class_name = "Granite"
    rank = 5
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048}
    flags = BIASES
    numbers = {
        "attention_multiplier": ("attention_scale", 1.0),
        "embedding_multiplier": ("multipliers.embedding", 1.0),
        "residual_multiplier": ("multipliers.residual", 1.0),
    }
    keys: ClassVar[tuple[str, ...]] = ("logits_scaling",)
    features: ClassVar[tuple[str, ...]] = ("multipliers.logits",)
    states_head_dim = False

    def suits(self, config: GPTConfig) -> bool:
        is_plain = config.norms == "pre" and config.qk_norm == "none"
        has_factors = config.multipliers != Multipliers() or config.attention_scale is not None
        return is_plain and has_factors

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"multipliers.logits": 1 / source.number("logits_scaling", 1.0)}

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        scale = config.attention_scale
        return {
            "attention_multiplier": config.head_size**-0.5 if scale is None else scale,
            # 15 digits, so that 1 / (1 / x) is x again
            "logits_scaling": float(f"{1 / config.multipliers.logits:.15g}"),
        }


@register
class GraniteSWA(Granite):
    """Sinks; windows in three of four layers; a base of RoPE for each layer, 0: no positions."""

    model_type = "granite_swa"
    class_name = "GraniteSWA"
    rank = 7
    defaults = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    }
    fixed = {"sinks": True}
    keys = (*Granite.keys, "layer_rope_theta")
    features = (
        *Granite.features,
        *("window", "window_layers", "window_rope_theta", "nope_layers"),
    )

    def suits(self, config: GPTConfig) -> bool:
        return config.sinks and config.experts.count is None

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        features = super().read_features(source, layers)
        thetas = source.get("layer_rope_theta")
        if thetas is None:
            return features
        if len(thetas) != layers:
            raise source.error(f"layer_rope_theta must be a list of {layers} numbers")
        windowed = self.read_windowed(source, layers)
        bases = {theta for n, theta in enumerate(thetas) if theta and n in windowed}
        full = {theta for n, theta in enumerate(thetas) if theta and n not in windowed} or bases
        if len(full) > 1 or len(bases) > 1 or (len(full | bases) > 1 and source.rope()[1]):
            raise source.error(
                f"layer_rope_theta={json.dumps(thetas)[:80]} is not covered yet; only one base for "
                "layers with a window, which is not scaled, and one for those without"
            )
        features["nope_layers"] = [n for n, theta in enumerate(thetas) if not theta]
        features["rope_theta"] = float(max(full, default=source.rope()[0]))
        if len(full | bases) > 1:
            features["window_rope_theta"] = float(max(bases))
        return features

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        return [n for n in range(layers) if n % 4]

    def check_features(self, config: GPTConfig) -> None:
        if config.window_rope_theta is not None and config.rope_scaling:
            raise self.cannot(config, "window_rope_theta")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        windowed, own = windowed_layers(config), config.window_rope_theta
        thetas = [own if own and n in windowed else config.rope_theta for n in range(config.layers)]
        for n in config.nope_layers:
            thetas[n] = 0
        return {
            **super().write_features(config),
            # transformers asks for one even if no layer has it
            "sliding_window": config.window or self.defaults["sliding_window"],
            "layer_rope_theta": thetas,
        }
