"""Llama 1 to 3 and all that goes by their name; SmolLM3, with layers without rotary positions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register

BIASES = {"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)}


@register
class Llama(Family):
    """No windows; biases in attention (all four) or the MLP (all three) or neither."""

    model_type = "llama"
    class_name = "Llama"
    rank = 0
    defaults = {"max_position_embeddings": 2048}
    flags = BIASES

    def suits(self, config: GPTConfig) -> bool:
        return True

    def check_features(self, config: GPTConfig) -> None:
        if config.channels % config.heads:
            raise ValueError(
                f"model.channels={config.channels} with model.heads={config.heads}: "
                "Llama wants a multiple of the heads"
            )


@register
class SmolLM3(Family):
    """Layers without rotation; windows in any layers; biases as in Llama."""

    model_type = "smollm3"
    class_name = "SmolLM3"
    rank = 3
    defaults = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }
    flags = BIASES
    keys = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window")
    features = ("nope_layers", "window", "window_layers")
    states_head_dim = False

    def suits(self, config: GPTConfig) -> bool:
        some_windowed = config.window_layers is not None
        is_biased = config.mlp_bias and not config.qkv_bias
        return bool(config.nope_layers) or (some_windowed and is_biased)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"nope_layers": self.default_windowed(source, layers)}

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        rotates = [int(n not in config.nope_layers) for n in range(config.layers)]
        return {"no_rope_layers": rotates}

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        """Return the layers without rotation: 0 in no_rope_layers, by default every fourth."""
        flags = source.get("no_rope_layers")
        if flags is None:
            name = "no_rope_layer_interval"
            every = source.with_defaults({name: 4}).size(name)
            return list(range(every - 1, layers, every))
        is_list = isinstance(flags, list) and len(flags) >= layers
        if not is_list or any(flag not in (0, 1) for flag in flags):
            raise source.error(
                f"no_rope_layers={json.dumps(flags)[:80]} must be a list of {layers} times 0 or 1"
            )
        return [n for n in range(layers) if not flags[n]]
