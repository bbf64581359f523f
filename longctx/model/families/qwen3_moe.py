"""Qwen3-MoE: Qwen3 with experts in all layers, or in some."""

from __future__ import annotations

from typing import Any

from longctx.config.experts import ExpertsConfig
from longctx.config.model_config import GPTConfig
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, read_windows, register
from longctx.model.families.mixtral import AUX_LOSS, read_balance
from longctx.model.families.qwen import Qwen3


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
    keys = (
        *("attention_bias", "use_sliding_window", "sliding_window", "decoder_sparse_step"),
        *("moe_intermediate_size", "num_experts_per_tok", "num_experts", "num_local_experts"),
        *("norm_topk_prob", "mlp_only_layers", AUX_LOSS),
    )
    harmless = ("output_router_logits",)
    features = (
        *("qk_norm", "qkv_bias", "out_bias", "window", "experts.count", "experts.per_token"),
        *("experts.ffn", "experts.dense_layers", "experts.normalize", "experts.balance"),
    )

    check_features = Qwen3.check_features

    def suits(self, config: GPTConfig) -> bool:
        return config.experts.count is not None and config.qk_norm == "head"

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        # transformers reads the first of these names too, and writes it
        count = "num_local_experts" if source.get("num_local_experts") else "num_experts"
        every, dense = source.size("decoder_sparse_step"), source.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise source.error(f"mlp_only_layers={dense!r} must be a list of layers")
        experts = ExpertsConfig(
            count=source.size(count),
            per_token=source.size("num_experts_per_tok"),
            ffn=source.size("moe_intermediate_size"),
            dense_layers=[n for n in range(layers) if n in dense or (n + 1) % every],
            normalize=source.flag("norm_topk_prob"),
            balance=read_balance(source),
        )
        biased, windowed = source.flag("attention_bias"), source.flag("use_sliding_window")
        return {
            **{"qk_norm": "head", "qkv_bias": biased, "out_bias": biased, "experts": experts},
            **read_windows(source, layers, windowed, otherwise=lambda: range(layers)),
        }

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "attention_bias": config.qkv_bias,
            "head_dim": config.head_size,
            "use_sliding_window": config.window is not None,
            "sliding_window": config.window,
            "num_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.expert_ffn,
            "norm_topk_prob": config.experts.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": config.experts.dense_layers,
            AUX_LOSS: config.experts.balance,
        }
