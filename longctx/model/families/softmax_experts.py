"""Mixtral: Mistral with experts in every layer; Qwen3-MoE: Qwen3 with experts in all or some.

A softmax router chooses. The weights of a token's experts add up to 1, in Qwen3-MoE if it says so.
"""

from __future__ import annotations

from typing import Any

from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register

AUX_LOSS = "router_aux_loss_coef"


@register
class Mixtral(Family):
    """No biases; one window, or none."""

    model_type = "mixtral"
    class_name = "Mixtral"
    rank = 5
    defaults = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    sizes = {
        "num_local_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
    }
    keys = ("router_jitter_noise", AUX_LOSS)
    harmless = ("output_router_logits",)
    names = {"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    features = ("window", "experts.ffn", "experts.balance")

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        source.refuse_unless("router_jitter_noise", source.get("router_jitter_noise", 0.0), (0.0,))
        return {"experts.balance": read_balance(source)}

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "intermediate_size": config.expert_ffn,
            AUX_LOSS: config.experts.balance,
        }


def read_balance(source: ConfigJson) -> float:
    """Return the factor of the balancing loss; 0 if it is missing."""
    value = source.get(AUX_LOSS)
    return source.number(AUX_LOSS, 1.0) if value else 0.0


@register
class Qwen3Moe(Family):
    """Norms on q and k always; biases in all of attention or nowhere; one window, or none."""

    model_type = "qwen3_moe"
    class_name = "Qwen3Moe"
    rank = 6
    defaults = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "moe_intermediate_size": 768,
    }
    fixed = {"qk_norm": "head"}
    flags = {
        "attention_bias": ("qkv_bias", "out_bias"),
        "norm_topk_prob": ("experts.normalize",),
    }
    sizes = {
        "num_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
        "moe_intermediate_size": "experts.ffn",
    }
    keys = (
        *("use_sliding_window", "decoder_sparse_step", "mlp_only_layers", "num_local_experts"),
        AUX_LOSS,
    )
    harmless = ("output_router_logits",)
    features = ("window", "experts.dense_layers", "experts.balance")

    def read(self, source: ConfigJson) -> GPTConfig:
        # transformers reads this name too, and writes it
        if source.get("num_local_experts"):
            source = source.with_keys(num_experts=source.size("num_local_experts"))
        return super().read(source)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        every, dense = source.size("decoder_sparse_step"), source.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise source.error(f"mlp_only_layers={dense!r} must be a list of layers")
        return {
            "experts.dense_layers": [n for n in range(layers) if n in dense or (n + 1) % every],
            "experts.balance": read_balance(source),
        }

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": config.experts.dense_layers,
            AUX_LOSS: config.experts.balance,
        }
