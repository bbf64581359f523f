"""AFMoE (Trinity): a gate per channel after attention, norms on both sides of each branch, experts
with a sigmoid router behind some dense layers. Layers without a window have no positions.
"""

from __future__ import annotations

from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import register, windowed_layers
from longctx.model.families.glm import SigmoidExperts


@register
class Afmoe(SigmoidExperts):
    """Biases in all of attention or nowhere; windows in all layers but every fourth by default."""

    model_type = "afmoe"
    class_name = "Afmoe"
    rank = 8
    defaults = {
        **{"head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5},
        **{"num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
        **{"num_shared_experts": 2, "num_dense_layers": 1},
        **{"global_attn_every_n_layers": 4, "sliding_window": 1024},
    }
    fixed = SigmoidExperts.fixed | {
        **{"norms": "sandwich", "qk_norm": "head", "attention_gate": "channel"}
    }
    flags = {"attention_bias": ("qkv_bias", "out_bias")}
    sizes = {
        "num_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
        "moe_intermediate_size": "experts.ffn",
        "num_shared_experts": "experts.shared",
    }
    numbers = {"route_scale": "experts.scale"}
    dense = "num_dense_layers"
    full_every = "global_attn_every_n_layers"
    keys = (dense, full_every, "mup_enabled")
    # Of its published folders; its class in transformers does not read them
    harmless = (
        *("output_router_logits", "load_balance_coeff", "n_group", "topk_group"),
        *("num_limited_groups", "num_expert_groups", "route_norm", "score_func"),
    )
    names = {
        "mlp.gate": "mlp.router.gate",
        "mlp.correction.weight": "mlp.expert_bias",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    features = (
        *("nope_layers", "window", "window_layers", "multipliers.embedding"),
        "experts.dense_layers",
    )

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        windowed = self.read_windowed(source, layers)
        factor = source.size("hidden_size") ** 0.5 if source.flag("mup_enabled") else 1.0
        return super().read_features(source, layers) | {
            "nope_layers": [n for n in range(layers) if n not in windowed],
            "multipliers.embedding": factor,
        }

    def check_features(self, config: GPTConfig) -> None:
        super().check_features(config)
        full = sorted({*range(config.layers)} - {*windowed_layers(config)})
        if config.nope_layers != full:
            raise self.cannot(config, "nope_layers")
        if config.multipliers.embedding not in (1, config.channels**0.5):
            raise self.cannot(config, "multipliers.embedding")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_features(config) | {
            "sliding_window": config.window or self.defaults["sliding_window"],
            "mup_enabled": config.multipliers.embedding != 1,
        }
