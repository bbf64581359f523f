"""AFMoE (Trinity): a gate per channel after attention, norms on both sides of each branch, experts
with a sigmoid router behind some dense layers. Layers without a window have no positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longctx.config.model_config import GPTConfig, Multipliers
from longctx.config.parts import Piece
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import read_windows, register, windowed_layers, write_windows
from longctx.model.families.glm import SigmoidExperts

# Parts of our names → its own
NAMES = {
    "mlp.gate.": "mlp.router.gate.",
    "mlp.correction.weight": "mlp.expert_bias",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


@register
class Afmoe(SigmoidExperts):
    """Biases in all of attention or nowhere; windows in all layers but every fourth by default."""

    model_type = "afmoe"
    class_name = "Afmoe"
    rank = 7
    counts = {
        "count": "num_experts",
        "per_token": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "shared": "num_shared_experts",
    }
    scale, dense = "route_scale", "num_dense_layers"
    defaults = {
        **{"head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5},
        **{"num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
        **{"num_shared_experts": 2, "num_dense_layers": 1},
        **{"global_attn_every_n_layers": 4, "sliding_window": 1024},
    }
    keys = (
        *("attention_bias", "sliding_window", "global_attn_every_n_layers", "mup_enabled"),
        *(*counts.values(), scale, dense),
    )
    # Of its published folders; its class in transformers does not read them
    harmless = (
        *("output_router_logits", "load_balance_coeff", "n_group", "topk_group"),
        *("num_limited_groups", "num_expert_groups", "route_norm", "score_func"),
    )
    features = (
        *("norms", "qk_norm", "qkv_bias", "out_bias", "attention_gate", "nope_layers", "window"),
        *("window_layers", "multipliers.embedding", "experts.router", "experts.scale"),
        *("experts.dense_layers", *(f"experts.{key}" for key in counts)),
    )

    def suits(self, config: GPTConfig) -> bool:
        return config.experts.router == "sigmoid_bias" and config.norms == "sandwich"

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        every = source.size("global_attn_every_n_layers")
        windowed = [n for n in range(layers) if (n + 1) % every]
        windows = read_windows(source, layers, used=True, otherwise=lambda: windowed)
        rotated = windows.get("window_layers", ())
        rotated = range(layers) if rotated is None else rotated
        experts = self.read_experts(source, layers)
        factor = source.size("hidden_size") ** 0.5 if source.flag("mup_enabled") else 1.0
        biased = source.flag("attention_bias")
        return {
            **{"norms": "sandwich", "qk_norm": "head", "attention_gate": "channel"},
            **{"qkv_bias": biased, "out_bias": biased, "experts": experts, **windows},
            "nope_layers": [n for n in range(layers) if n not in rotated],
            "multipliers": Multipliers(embedding=factor),
        }

    def check_features(self, config: GPTConfig) -> None:
        super().check_features(config)
        full = sorted({*range(config.layers)} - {*windowed_layers(config)})
        for key, is_right in (
            ("qk_norm", config.qk_norm == "head"),
            ("attention_gate", config.attention_gate == "channel"),
            ("out_bias", config.out_bias == config.qkv_bias),
            ("nope_layers", config.nope_layers == full),
            ("multipliers.embedding", config.multipliers.embedding in (1, config.channels**0.5)),
        ):
            if not is_right:
                raise self.cannot(config, key)

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            **write_windows(config) | {"sliding_window": config.window or 1024},
            **self.write_experts(config),
            "head_dim": config.head_size,
            "attention_bias": config.qkv_bias,
            "mup_enabled": config.multipliers.embedding != 1,
        }

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        for piece in super().tensors(config):
            theirs = piece.theirs
            for ours, name in NAMES.items():
                theirs = theirs.replace(ours, name)
            yield piece._replace(theirs=theirs)
