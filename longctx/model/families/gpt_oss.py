"""gpt-oss: experts with biases and a clamped SwiGLU, sinks, and windows in every second layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from longctx.config.experts import STEEPNESS
from longctx.config.model_config import GPTConfig
from longctx.config.parts import Fold, Piece
from longctx.model.families.config_json import ConfigJson
from longctx.model.families.family import Family, register
from longctx.model.families.softmax_experts import AUX_LOSS, read_balance

# transformers' own, if config.json has none
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
class GptOss(Family):
    """Sinks always; biases in experts always, in attention in all of it or nowhere."""

    model_type = "gpt_oss"
    class_name = "GptOss"
    rank = 8
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
        "swiglu_alpha": STEEPNESS,
        "swiglu_limit": 7.0,
    }
    rope = ROPE
    fixed = {"sinks": True, "experts.biased": True}
    flags = {"attention_bias": ("qkv_bias", "out_bias")}
    sizes = {
        "num_local_experts": "experts.count",
        "num_experts_per_tok": "experts.per_token",
    }
    keys = ("swiglu_alpha", "swiglu_limit", "quantization_config", AUX_LOSS)
    # the number of experts has two names
    harmless = ("output_router_logits", "experts_per_token", "initial_context_length")
    names = {"mlp.gate": "mlp.router"}
    features = ("window", "window_layers", "experts.ffn", "experts.clamp", "experts.balance")

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        source.refuse_unless("swiglu_alpha", source.get("swiglu_alpha"), (STEEPNESS,))
        quantized = source.get("quantization_config") or {"quant_method": "mxfp4"}
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        source.refuse_unless("quantization_config.quant_method", method, ("mxfp4",))
        clamp = source.number("swiglu_limit", 7.0)
        return {"experts.clamp": clamp, "experts.balance": read_balance(source)}

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        return range(0, layers, 2)

    def check_features(self, config: GPTConfig) -> None:
        if config.experts.clamp is None:
            raise self.cannot(config, "experts.clamp")

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "intermediate_size": config.expert_ffn,
            "swiglu_alpha": STEEPNESS,
            "swiglu_limit": config.experts.clamp,
            AUX_LOSS: config.experts.balance,
        }

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
