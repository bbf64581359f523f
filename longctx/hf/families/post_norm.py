"""Families that normalize what a branch adds: OLMo 2 and 3, EXAONE 4, Gemma 3, GLM-4.

OLMo and EXAONE have no norm before a branch. OLMo normalizes all heads of q and k together. OLMo 3
has windows in three of four layers, and YaRN stretches the others alone. In EXAONE 4 the layers
without a window have no positions.

Gemma 3 and GLM-4 have norms on both sides. Gemma's norms multiply by 1 + w, its windows have a rope
of their own, and its embedding is scaled. In GLM-4 half of a head rotates, in pairs (2i, 2i + 1).
They are folded at load: here a channel rotates with the one half of them further on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family, TwoRopes, register
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import Interleaved, Piece

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


@register
class Olmo2(Family):
    """One rope and no windows; biases in all of attention or nowhere."""

    model_type = "olmo2"
    class_name = "Olmo2"
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    fixed = {"norms": "post", "qk_norm": "whole"}
    flags = {"attention_bias": ("qkv_bias", "out_bias")}


@register
class Olmo3(TwoRopes, Olmo2):
    """Windows in layers of layer_types, by default all but every fourth."""

    model_type = "olmo3"
    class_name = "Olmo3"
    defaults = Olmo2.defaults | {"sliding_window": 4096}
    keys = ("sliding_window",)
    full_every = 4
    thetas = 500_000.0, 500_000.0


@register
class Exaone4(Family):
    """No biases. Without sliding_window every layer sees the whole past and has positions."""

    model_type = "exaone4"
    class_name = "Exaone4"
    defaults = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    fixed = {"norms": "post", "qk_norm": "head"}
    full_every = "sliding_window_pattern"
    keys = ("sliding_window",)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        if source.get("sliding_window") is None:
            return {}
        windowed = self.read_windowed(source, layers)
        return {"nope_layers": [n for n in range(layers) if n not in windowed]}


@register
class Gemma3Text(TwoRopes):
    """Biases in all of attention or nowhere; windows in all layers but every sixth by default."""

    model_type = "gemma3_text"
    class_name = "Gemma3"
    defaults = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
    fixed = {"norms": "sandwich", "norm_plus_one": True, "qk_norm": "head"}
    flags = {"attention_bias": ("qkv_bias", "out_bias")}
    full_every = "sliding_window_pattern"
    numbers = {"final_logit_softcapping": ("multipliers.logit_softcap", None)}
    covered = {"use_bidirectional_attention": (False, None)}
    keys = (
        *("hidden_activation", "query_pre_attn_scalar", "rope_local_base_freq"),
        "sliding_window",
    )
    harmless = ("hidden_act", "cache_implementation")
    thetas = 1_000_000.0, 10_000.0

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        activation = source.get("hidden_activation")
        source.refuse_unless("hidden_activation", activation, tuple(ACTIVATIONS))
        scalar = source.size("query_pre_attn_scalar")
        return {
            "activation": ACTIVATIONS[activation],
            "attention_scale": None if scalar == source.size("head_dim") else scalar**-0.5,
            "multipliers.embedding": source.size("hidden_size") ** 0.5,
        }


@register
class Glm4(Family):
    """Biases in q, k and v or nowhere; gate and up are one tensor."""

    model_type = "glm4"
    class_name = "Glm4"
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    }
    fixed = {"norms": "sandwich", "qk_norm": "none"}
    flags = {"attention_bias": ("qkv_bias",)}
    keys = ("partial_rotary_factor",)
    harmless = ("mlp_bias",)
    names = {
        **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        fold = Interleaved(config.head_size, config.rotary_size)
        for piece in super().tensors(config):
            is_rotated = piece.theirs.split(".")[-2] in ("q_proj", "k_proj")
            yield piece._replace(fold=fold) if is_rotated else piece
