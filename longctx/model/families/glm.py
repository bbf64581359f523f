"""GLM-4: norms on both sides of attention and MLP, half of a head rotates, in pairs (2i, 2i + 1).

The pairs are folded at load: here a channel rotates with the one half of them further on. GLM-4.5
is a model of experts behind some dense layers, with norms and pairs as in Llama.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from longctx.config.experts import ExpertsConfig
from longctx.config.model_config import GPTConfig
from longctx.config.parts import Interleaved, Piece
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register


class SigmoidExperts(Family):
    """A family with experts that a sigmoid router chooses, behind some dense layers."""

    # key of ExpertsConfig → the same in config.json
    counts: ClassVar[dict[str, str]]
    # keys of config.json: of the weights' factor, and the number of dense layers
    scale: ClassVar[str]
    dense: ClassVar[str]

    def read_experts(self, source: ConfigJson, layers: int, **more: Any) -> ExpertsConfig:
        """Return the experts of a config.json; `more` are its own."""
        dense = source.get(self.dense)
        if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
            raise source.error(f"{self.dense}={dense!r} must be a whole number from 0 up")
        more |= {ours: source.size(theirs) for ours, theirs in self.counts.items()}
        return ExpertsConfig(
            router="sigmoid_bias",
            dense_layers=list(range(min(dense, layers))),
            scale=source.number(self.scale, 1.0),
            **more,
        )

    def write_experts(self, config: GPTConfig) -> dict[str, Any]:
        """Return their keys of config.json."""
        experts = replace(config.experts, ffn=config.expert_ffn)
        sizes = {theirs: getattr(experts, ours) for ours, theirs in self.counts.items()}
        return sizes | {self.scale: experts.scale, self.dense: len(experts.dense_layers)}

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


@register
class Glm4Moe(SigmoidExperts):
    """Biases in q, k and v or nowhere. The layers behind the last one, which predict further
    tokens, are left out.
    """

    model_type = "glm4_moe"
    class_name = "Glm4Moe"
    rank = 7
    counts = {
        "count": "n_routed_experts",
        "per_token": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "groups": "n_group",
        "groups_per_token": "topk_group",
        "shared": "n_shared_experts",
    }
    scale, dense = "routed_scaling_factor", "first_k_dense_replace"
    defaults = {
        **{"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        **{"partial_rotary_factor": 0.5, "norm_topk_prob": True, "first_k_dense_replace": 1},
        **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
        **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    }
    keys = (
        *("attention_bias", "use_qk_norm", "partial_rotary_factor", "norm_topk_prob"),
        "num_local_experts",
        *(*counts.values(), scale, dense),
    )
    harmless = ("output_router_logits", "num_nextn_predict_layers", "num_mtp_layers")
    features = (
        *("qkv_bias", "qk_norm", "rotary_share", "experts.router", "experts.scale"),
        *("experts.dense_layers", "experts.normalize", *(f"experts.{key}" for key in counts)),
    )

    def suits(self, config: GPTConfig) -> bool:
        return config.experts.router == "sigmoid_bias" and config.norms == "pre"

    def read(self, source: ConfigJson) -> GPTConfig:
        # Another name, which transformers reads too
        count = source.get("num_local_experts")
        renamed = {} if count is None else {"n_routed_experts": count}
        return super().read(ConfigJson(source.file, source.keys | renamed))

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {
            "qkv_bias": source.flag("attention_bias"),
            "qk_norm": "head" if source.flag("use_qk_norm") else "none",
            "experts": self.read_experts(source, layers, normalize=source.flag("norm_topk_prob")),
        }

    def check_features(self, config: GPTConfig) -> None:
        super().check_features(config)
        if config.qk_norm == "whole":
            raise self.cannot(config, "qk_norm")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return self.write_experts(config) | {
            "attention_bias": config.qkv_bias,
            "use_qk_norm": config.qk_norm == "head",
            "head_dim": config.head_size,
            "partial_rotary_factor": config.rotary_share,
            "norm_topk_prob": config.experts.normalize,
            "num_nextn_predict_layers": 0,
        }

    def leaves_out(self, tensor: str, config: GPTConfig) -> bool:
        layer = tensor.removeprefix("model.layers.").partition(".")[0]
        return layer.isdecimal() and int(layer) >= config.layers

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        for piece in super().tensors(config):
            bias = "mlp.gate.e_score_correction_bias"
            yield piece._replace(theirs=piece.theirs.replace("mlp.correction.weight", bias))
