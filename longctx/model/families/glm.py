"""GLM-4: norms on both sides of attention and MLP, half of a head rotates, in pairs (2i, 2i + 1).

The pairs are folded at load: here a channel rotates with the one half of them further on. GLM-4.5
is a model of experts behind some dense layers, with norms and pairs as in Llama.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from longctx.config.model_config import GPTConfig
from longctx.config.parts import Interleaved, Piece
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register


class SigmoidExperts(Family):
    """A family with experts that a sigmoid router chooses, behind some dense layers."""

    fixed = {"experts.router": "sigmoid_bias"}
    # key of config.json: the number of dense layers
    dense: ClassVar[str]

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        dense = source.get(self.dense)
        if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
            raise source.error(f"{self.dense}={dense!r} must be a whole number from 0 up")
        return {"experts.dense_layers": list(range(min(dense, layers)))}

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {self.dense: len(config.experts.dense_layers)}

    def check_features(self, config: GPTConfig) -> None:
        dense = config.experts.dense_layers
        if dense != list(range(len(dense))):
            raise self.cannot(config, "experts.dense_layers")
        if not config.experts.shared:
            raise self.cannot(config, "experts.shared")


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
    features = ("rotary_share",)

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {"partial_rotary_factor": config.rotary_share}

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        fold = Interleaved(config.head_size, config.rotary_size)
        for piece in super().tensors(config):
            is_rotated = piece.theirs.split(".")[-2] in ("q_proj", "k_proj")
            yield piece._replace(fold=fold) if is_rotated else piece


@register
class Glm4Moe(SigmoidExperts):
    """Biases in q, k and v or nowhere. The layers behind the last one, which predict further
    tokens, are left out.
    """

    model_type = "glm4_moe"
    class_name = "Glm4Moe"
    rank = 7
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
    numbers = {"routed_scaling_factor": "experts.scale"}
    dense = "first_k_dense_replace"
    keys = (dense, "use_qk_norm", "partial_rotary_factor", "num_local_experts")
    harmless = ("output_router_logits", "num_nextn_predict_layers", "num_mtp_layers")
    names = {"mlp.correction.weight": "mlp.gate.e_score_correction_bias"}
    features = ("qk_norm", "rotary_share", "experts.dense_layers")

    def read(self, source: ConfigJson) -> GPTConfig:
        # Another name, which transformers reads too
        if source.get("num_local_experts") is not None:
            source = source.with_keys(n_routed_experts=source.size("num_local_experts"))
        return super().read(source)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        norm = "head" if source.flag("use_qk_norm") else "none"
        return super().read_features(source, layers) | {"qk_norm": norm}

    def check_features(self, config: GPTConfig) -> None:
        super().check_features(config)
        if config.qk_norm == "whole":
            raise self.cannot(config, "qk_norm")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_features(config) | {
            "use_qk_norm": config.qk_norm == "head",
            "partial_rotary_factor": config.rotary_share,
            "num_nextn_predict_layers": 0,
        }

    def leaves_out(self, tensor: str, config: GPTConfig) -> bool:
        layer = tensor.removeprefix("model.layers.").partition(".")[0]
        return layer.isdecimal() and int(layer) >= config.layers
