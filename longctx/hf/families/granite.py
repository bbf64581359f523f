"""Granite 3 and 4: Llama with factors of embedding, branches, scores and logits; Granite SWA, with
sinks and windows too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family, register
from longctx.hf.families.llama import BIASES


@register
class Granite(Family):
    """No windows; biases in attention (all four) or the MLP (all three) or neither."""

    model_type = "granite"
    class_name = "Granite"
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048}
    flags = BIASES
    numbers = {
        "attention_multiplier": ("attention_scale", 1.0),
        "embedding_multiplier": ("multipliers.embedding", 1.0),
        "residual_multiplier": ("multipliers.residual", 1.0),
    }
    keys: ClassVar[tuple[str, ...]] = ("logits_scaling",)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"multipliers.logits": 1 / source.number("logits_scaling", 1.0)}


@register
class GraniteSWA(Granite):
    """Sinks; windows in three of four layers; a base of RoPE for each layer, 0: no positions."""

    model_type = "granite_swa"
    class_name = "GraniteSWA"
    defaults = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    }
    fixed = {"sinks": True}
    keys = (*Granite.keys, "layer_rope_theta", "sliding_window")

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
