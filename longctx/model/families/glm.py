"""GLM-4: norms on both sides of attention and MLP, half of a head rotates, in pairs (2i, 2i + 1).

The pairs are folded at load: here a channel rotates with the one half of them further on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.config.parts import Interleaved, Piece
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register


@register
class Glm4(Family):
    """Biases in q, k and v or nowhere; gate and up are one tensor."""

    model_type = "glm4"
    class_name = "Glm4"
    rank = 6
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    }
    keys = ("attention_bias", "partial_rotary_factor")
    harmless = ("mlp_bias",)
    names = {
        **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    features = ("qkv_bias", "norms", "rotary_share")

    def suits(self, config: GPTConfig) -> bool:
        is_gemma = config.activation != "silu" or config.softcap is not None
        return config.norms == "sandwich" and config.qk_norm == "none" and not is_gemma

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"qkv_bias": source.flag("attention_bias"), "norms": "sandwich"}

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "attention_bias": config.qkv_bias,
            "head_dim": config.head_size,
            "partial_rotary_factor": config.rotary_share,
        }

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        fold = Interleaved(config.head_size, config.rotary_size)
        for piece in super().tensors(config):
            is_rotated = piece.theirs.split(".")[-2] in ("q_proj", "k_proj")
            yield piece._replace(fold=fold) if is_rotated else piece
