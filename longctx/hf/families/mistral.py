"""Mistral and its relatives: Llama without biases and with sliding windows.

Mistral has a window in every layer, Ministral in the layers of layer_types. transformers saves a
Mistral folder with layer_types as Ministral. In Ministral 3 queries grow with their position.
"""

from __future__ import annotations

from typing import Any, ClassVar

from longctx.config.rope_config import KEYS, ORIGINAL
from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family, register
from longctx.spec.model_config import GPTConfig


@register
class Mistral(Family):
    """No biases; one window."""

    model_type = "mistral"
    class_name = "Mistral"
    defaults = {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }
    harmless = ("use_sliding_window",)
    keys: ClassVar[tuple[str, ...]] = ("sliding_window",)


@register
class Ministral(Mistral):
    """No biases; a window in some layers."""

    model_type = "ministral"
    class_name = "Ministral"
    keys = ("sliding_window", "layer_types")


BETA = "llama_4_scaling_beta"
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}


@register
class Ministral3(Mistral):
    """The growth stands among the rope_parameters, with the length that both share."""

    model_type = "ministral3"
    class_name = "Ministral3"
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    }
    rope = MINISTRAL3_ROPE
    keys = (BETA, "sliding_window")

    def read(self, source: ConfigJson) -> GPTConfig:
        place, rope = source.rope_key, source.get(source.rope_key) or self.rope
        # as transformers fills it in
        length = rope.get(ORIGINAL, source.get("max_position_embeddings"))
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        left_out = {BETA, "max_position_embeddings"}
        if kind in KEYS and ORIGINAL not in KEYS[kind][0]:
            left_out.add(ORIGINAL)
        rest = {key: value for key, value in rope.items() if key not in left_out}
        keys = {place: rest, BETA: rope.get(BETA) or 0.0, ORIGINAL: length}
        return super().read(source.with_keys(**keys))

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"query_growth": [source.number(BETA, None), float(source.size(ORIGINAL))]}

    def write_rope(self, config: GPTConfig) -> dict[str, Any]:
        beta, tokens = config.query_growth
        growth = {BETA: beta, ORIGINAL: int(tokens)}
        keys = super().write_rope(config)
        return {key: x | growth if isinstance(x, dict) else x for key, x in keys.items()}
