"""Mixtral: Mistral with experts in every layer; the weights of a token's experts add up to 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longctx.config.experts import ExpertsConfig
from longctx.config.model_config import GPTConfig
from longctx.config.parts import Piece
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, read_windows, register

# Names of its folders, which transformers keeps
NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
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
    keys = (
        *("sliding_window", "num_local_experts", "num_experts_per_tok"),
        *("router_jitter_noise", AUX_LOSS),
    )
    harmless = ("output_router_logits",)
    features = (
        *("window", "experts.count", "experts.per_token", "experts.ffn"),
        "experts.balance",
    )

    def suits(self, config: GPTConfig) -> bool:
        return config.experts.count is not None and config.qk_norm == "none"

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        source.refuse_unless("router_jitter_noise", source.get("router_jitter_noise", 0.0), (0.0,))
        experts = ExpertsConfig(
            count=source.size("num_local_experts"),
            per_token=source.size("num_experts_per_tok"),
            balance=read_balance(source),
        )
        windows = read_windows(source, layers, used=True, otherwise=lambda: range(layers))
        return {"experts": experts, **windows}

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "intermediate_size": config.expert_ffn,
            "num_local_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            AUX_LOSS: config.experts.balance,
            "sliding_window": config.window,
            "head_dim": config.head_size,
        }

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        for piece in super().tensors(config):
            layer, is_expert, name = piece.theirs.partition(".mlp.")
            if is_expert:
                *parents, matrix, kind = name.split(".")
                name = ".".join((*parents, NAMES.get(matrix, matrix), kind))
                layer += ".block_sparse_moe."
            yield piece._replace(theirs=layer + name)


def read_balance(source: ConfigJson) -> float:
    """Return the factor of the balancing loss; 0 if it is missing."""
    value = source.get(AUX_LOSS)
    return source.number(AUX_LOSS, 1.0) if value else 0.0
