"""Gemma 3: norms on both sides of a branch, windows with a rope of their own, GELU, and a scaled
embedding. Its norms multiply by 1 + w.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.config.parts import OnePlus, Piece
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import TwoRopes, register

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


@register
class Gemma3Text(TwoRopes):
    """Biases in all of attention or nowhere; windows in all layers but every sixth by default."""

    model_type = "gemma3_text"
    class_name = "Gemma3"
    rank = 6
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
        "use_bidirectional_attention": False,
    }
    fixed = {"norms": "sandwich", "qk_norm": "head"}
    flags = {"attention_bias": ("qkv_bias", "out_bias")}
    full_every = "sliding_window_pattern"
    keys = (
        *("hidden_activation", "query_pre_attn_scalar", "rope_local_base_freq"),
        *(full_every, "final_logit_softcapping", "use_bidirectional_attention"),
    )
    harmless = ("hidden_act", "cache_implementation")
    features = (
        *("activation", "attention_scale", "window", "window_layers", "window_rope_theta"),
        *("multipliers.embedding", "multipliers.logit_softcap"),
    )
    thetas = 1_000_000.0, 10_000.0

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        source.refuse_unless(
            "use_bidirectional_attention", source.get("use_bidirectional_attention"), (False, None)
        )
        activation = source.get("hidden_activation")
        source.refuse_unless("hidden_activation", activation, tuple(ACTIVATIONS))
        scalar = source.size("query_pre_attn_scalar")
        capped = source.get("final_logit_softcapping") is not None
        return {
            "activation": ACTIVATIONS[activation],
            "attention_scale": None if scalar == source.size("head_dim") else scalar**-0.5,
            "multipliers.embedding": source.size("hidden_size") ** 0.5,
            "multipliers.logit_softcap": (
                source.number("final_logit_softcapping", 1.0) if capped else None
            ),
        }

    def check_features(self, config: GPTConfig) -> None:
        if config.multipliers.embedding != config.channels**0.5:
            raise self.cannot(config, "multipliers.embedding")
        if config.attention_scale not in (None, self.scalar_of(config) ** -0.5):
            raise self.cannot(config, "attention_scale")
        if config.channels % config.heads:
            raise self.cannot(config, "heads")

    def scalar_of(self, config: GPTConfig) -> int:
        """Return the whole number of which attention's scale is 1 / sqrt."""
        scale = config.attention_scale
        return config.head_size if scale is None else max(1, round(scale**-2))

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        return {
            # transformers wants a window even if no layer has it
            "sliding_window": config.window or self.defaults["sliding_window"],
            "rope_local_base_freq": config.window_rope_theta or config.rope_theta,
            "hidden_activation": names[config.activation],
            "query_pre_attn_scalar": self.scalar_of(config),
            "final_logit_softcapping": config.multipliers.logit_softcap,
        }

    def write(self, config: GPTConfig, context: int) -> dict[str, Any]:
        keys = super().write(config, context)
        del keys["hidden_act"]  # it has a name of its own
        return keys

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        for piece in super().tensors(config):
            yield piece._replace(fold=OnePlus()) if "norm" in piece.theirs else piece
