"""Granite 3 and 4: Llama with factors of embedding, branches, scores and logits."""

from __future__ import annotations

from typing import Any, ClassVar

from longctx.config.model_config import GPTConfig, Multipliers
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register

FACTORS = ("multipliers.embedding", "multipliers.residual", "multipliers.logits", "attention_scale")


@register
class Granite(Family):
    """No windows; biases in attention (all four) or the MLP (all three) or neither."""

    model_type = "granite"
    class_name = "Granite"
    rank = 5
    defaults = {"max_position_embeddings": 2048}
    keys: ClassVar[tuple[str, ...]] = (
        *("attention_bias", "mlp_bias", "attention_multiplier", "embedding_multiplier"),
        *("residual_multiplier", "logits_scaling"),
    )
    features: ClassVar[tuple[str, ...]] = ("qkv_bias", "out_bias", "mlp_bias", *FACTORS)

    def suits(self, config: GPTConfig) -> bool:
        is_plain = config.norms == "pre" and config.qk_norm == "none"
        has_factors = config.multipliers != Multipliers() or config.attention_scale is not None
        return is_plain and has_factors

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        biased = source.flag("attention_bias")
        return {
            **{"qkv_bias": biased, "out_bias": biased, "mlp_bias": source.flag("mlp_bias")},
            "attention_scale": source.number("attention_multiplier", 1.0),
            "multipliers": Multipliers(
                embedding=source.number("embedding_multiplier", 1.0),
                residual=source.number("residual_multiplier", 1.0),
                logits=1 / source.number("logits_scaling", 1.0),
            ),
        }

    def check_features(self, config: GPTConfig) -> None:
        if config.out_bias != config.qkv_bias:
            raise self.cannot(config, "out_bias")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        factors, scale = config.multipliers, config.attention_scale
        keys = {
            "attention_bias": config.qkv_bias,
            "mlp_bias": config.mlp_bias,
            "attention_multiplier": config.head_size**-0.5 if scale is None else scale,
            "embedding_multiplier": factors.embedding,
            "residual_multiplier": factors.residual,
            # 15 digits, so that 1 / (1 / x) is x again
            "logits_scaling": float(f"{1 / factors.logits:.15g}"),
        }
        if config.head_dim is not None:
            keys["head_dim"] = config.head_size
        return keys
