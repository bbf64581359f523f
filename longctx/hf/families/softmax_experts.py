"""Experts that a softmax router chooses: Mixtral, Qwen3-MoE and gpt-oss.

Mixtral is Mistral with experts in every layer, Qwen3-MoE is Qwen3 with experts in all or some. The
weights of a token's experts add up to 1, in Qwen3-MoE if it says so. gpt-oss has experts with
biases and a clamped SwiGLU, sinks, and windows in every second layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family, register
from longctx.spec.experts import STEEPNESS
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import Fold, Piece


class BalancedExperts(Family):
    """The loss that balances experts is trained only with output_router_logits, as in transformers,
    whatever its coefficient.
    """

    numbers = {"router_aux_loss_coef": ("experts.balance", 0.0)}
    harmless: ClassVar[tuple[str, ...]] = ("output_router_logits",)

    def read(self, source: ConfigJson) -> GPTConfig:
        # Here, since a coefficient of 0 must stay allowed
        source = source.with_defaults({"router_aux_loss_coef": 0.001})
        if not source.get("output_router_logits"):
            source = source.with_keys(router_aux_loss_coef=0.0)
        return super().read(source)

    def changed(self, config: GPTConfig) -> dict[str, Any]:
        balance = config.experts.balance
        balanced = {"router_aux_loss_coef": balance, "output_router_logits": balance > 0}
        return super().changed(config) | balanced


@register
class Mixtral(BalancedExperts):
    """No biases; one window, or none."""

    model_type = "mixtral"
    class_name = "Mixtral"
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
    covered = {"router_jitter_noise": (0.0,)}
    names = {"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    keys = ("sliding_window",)


@register
class Qwen3Moe(BalancedExperts):
    """Norms on q and k always; biases in all of attention or nowhere; one window, or none."""

    model_type = "qwen3_moe"
    class_name = "Qwen3Moe"
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
    aliases = {"num_local_experts": "num_experts"}
    keys = ("use_sliding_window", "decoder_sparse_step", "mlp_only_layers", "sliding_window")

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        every, dense = source.size("decoder_sparse_step"), source.get("mlp_only_layers") or []
        return {"experts.dense_layers": [n for n in range(layers) if n in dense or (n + 1) % every]}


# gpt-oss's rope in transformers, if config.json has none
ROPE = {
    **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096},
}


@dataclass(frozen=True)
class Stacked(Fold):
    """The folder has one tensor for all experts, transposed: (experts, columns, rows), or biases
    (experts, rows). If rows are `paired`, those of gate are 0, 2, 4, ... and those of up between.
    """

    count: int
    paired: bool

    def rows(self, shape: tuple[int, ...]) -> int:
        return self.count * shape[-1]

    def load(self, tensor: Any) -> Any:
        return self._sorted(_turned(tensor), (-1, 2)).flatten(0, 1)

    def save(self, rows: Any) -> Any:
        return _turned(self._sorted(rows.unflatten(0, (self.count, -1)), (2, -1))).contiguous()

    def _sorted(self, rows: Any, pairs: tuple[int, int]) -> Any:
        """Return (experts, rows, ...) with the halves or `pairs` of rows told apart."""
        return rows.unflatten(1, pairs).transpose(1, 2).flatten(1, 2) if self.paired else rows


def _turned(tensor: Any) -> Any:
    return tensor.mT if tensor.ndim == 3 else tensor


@register
class GptOss(BalancedExperts):
    """Sinks always; biases in experts always, in attention in all of it or nowhere."""

    model_type = "gpt_oss"
    class_name = "GptOss"
    defaults = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "rope_theta": ROPE["rope_theta"],
    }
    rope = ROPE
    fixed = {"sinks": True, "experts.biased": True}
    flags = {"attention_bias": ("qkv_bias", "out_bias")}
    sizes = {
        "num_local_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
    }
    numbers = BalancedExperts.numbers | {"swiglu_limit": ("experts.clamp", 7.0)}
    covered = {"swiglu_alpha": (STEEPNESS,)}
    keys = ("quantization_config", "sliding_window", "layer_types")
    # the number of experts has two names
    harmless = (*BalancedExperts.harmless, "experts_per_token", "initial_context_length")
    names = {"mlp.gate": "mlp.router"}

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        quantized = source.get("quantization_config") or {"quant_method": "mxfp4"}
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        source.refuse_unless("quantization_config.quant_method", method, ("mxfp4",))
        return {}

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        return range(0, layers, 2)

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        count = config.experts.count or 0
        for piece in super().tensors(config):
            layer, is_expert, matrix = piece.theirs.partition(".mlp.experts.")
            if not is_expert:
                yield piece
            # The first expert's tensor stands for all: the folder has them in one
            elif piece.first == 0:
                is_gate, is_bias = "gate_proj" in matrix, matrix.endswith(".bias")
                name = ("gate_up_proj" if is_gate else "down_proj") + "_bias" * is_bias
                rows = (2 if is_gate else 1) * piece.shape[0]
                yield piece._replace(
                    theirs=f"{layer}.mlp.experts.{name}",
                    shape=(count, *piece.shape[1:], rows),
                    fold=Stacked(count, is_gate),
                )
