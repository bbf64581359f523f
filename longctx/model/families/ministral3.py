"""Ministral 3: Mistral with queries that grow with their position."""

from __future__ import annotations

from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.config.rope_config import KEYS, ORIGINAL
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import register, write_rope
from longctx.model.families.mistral import Mistral

BETA = "llama_4_scaling_beta"
ROPE = {
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
    rank = 6
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    }
    rope = ROPE
    keys = (BETA,)
    features = ("window", "query_growth")

    def suits(self, config: GPTConfig) -> bool:
        return bool(config.query_growth) and config.qk_norm == "none"

    def read(self, source: ConfigJson) -> GPTConfig:
        place, rope = source.rope_key, source.get(source.rope_key) or self.rope
        if not isinstance(rope, dict):
            raise source.error(f"{place}={rope!r} must be an object")
        # as transformers fills it in
        length = rope.get(ORIGINAL, source.get("max_position_embeddings"))
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        left_out = {BETA, "max_position_embeddings"}
        if kind in KEYS and ORIGINAL not in KEYS[kind][0]:
            left_out.add(ORIGINAL)
        rest = {key: value for key, value in rope.items() if key not in left_out}
        keys = {place: rest, BETA: rope.get(BETA), ORIGINAL: length}
        return super().read(source.with_keys(**keys))

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"query_growth": [source.number(BETA, 0.0), float(source.size(ORIGINAL))]}

    def check_features(self, config: GPTConfig) -> None:
        # one key of rope_parameters holds both lengths
        if config.rope_scaling.get(ORIGINAL, config.query_growth[1]) != config.query_growth[1]:
            raise self.cannot(config, "query_growth")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        beta, tokens = config.query_growth
        added = {BETA: beta, ORIGINAL: int(tokens)}
        return {
            key: value | added
            for key, value in write_rope(config).items()
            if key in ("rope_parameters", "rope_scaling")
        }
