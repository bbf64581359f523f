"""Experts that a sigmoid router chooses, behind some dense layers: GLM-4.5 and AFMoE (Trinity).

GLM-4.5 has norms as in Llama. AFMoE has norms on both sides of each branch, a gate per channel
after attention, and no positions in layers without a window.
"""

from __future__ import annotations

from typing import Any, ClassVar

from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family, register
from longctx.spec.model_config import GPTConfig


class SigmoidExperts(Family):
    """A family with experts that a sigmoid router chooses, behind some dense layers."""

    fixed = {"experts.router": "sigmoid_bias"}
    # key of config.json: the number of dense layers
    dense: ClassVar[str]

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"experts.dense_layers": list(range(min(source.get(self.dense), layers)))}


@register
class Glm4Moe(SigmoidExperts):
    """Biases in q, k and v or nowhere. The layers behind the last one, which predict further
    tokens, are left out.
    """

    model_type = "glm4_moe"
    class_name = "Glm4Moe"
    defaults = {
        **{"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        **{"partial_rotary_factor": 0.5, "norm_topk_prob": True, "first_k_dense_replace": 1},
        **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
        **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    }
    flags = {"attention_bias": ("qkv_bias",), "norm_topk_prob": ("experts.normalize",)}
    sizes = {
        "n_routed_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
        "moe_intermediate_size": "experts.ffn",
        "n_group": "experts.groups",
        "topk_group": "experts.groups_per_token",
        "n_shared_experts": "experts.shared",
    }
    numbers = {"routed_scaling_factor": ("experts.scale", 1.0)}
    aliases = {"num_local_experts": "n_routed_experts"}
    dense = "first_k_dense_replace"
    keys = (dense, "use_qk_norm", "partial_rotary_factor")
    harmless = ("output_router_logits", "num_nextn_predict_layers", "num_mtp_layers")
    names = {"mlp.correction.weight": "mlp.gate.e_score_correction_bias"}

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        norm = "head" if source.flag("use_qk_norm") else "none"
        return super().read_features(source, layers) | {"qk_norm": norm}

    def changed(self, config: GPTConfig) -> dict[str, Any]:
        return super().changed(config) | {"num_nextn_predict_layers": 0}

    def leaves_out(self, tensor: str, config: GPTConfig) -> bool:
        layer = tensor.removeprefix("model.layers.").partition(".")[0]
        return layer.isdecimal() and int(layer) >= config.layers


@register
class Afmoe(SigmoidExperts):
    """Biases in all of attention or nowhere; windows in all layers but every fourth by default."""

    model_type = "afmoe"
    class_name = "Afmoe"
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
    numbers = {"route_scale": ("experts.scale", 1.0)}
    dense = "num_dense_layers"
    full_every = "global_attn_every_n_layers"
    keys = (dense, "mup_enabled", "sliding_window")
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

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        windowed = self.read_windowed(source, layers)
        factor = source.size("hidden_size") ** 0.5 if source.flag("mup_enabled") else 1.0
        return super().read_features(source, layers) | {
            "nope_layers": [n for n in range(layers) if n not in windowed],
            "multipliers.embedding": factor,
        }
