"""Code of families with experts. families.toml has what tables can say.

gpt-oss has one tensor for all experts of a layer. Layers of GLM-4.5 for further tokens are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import Family
from longctx.hf.families.folds import Stacked
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import Piece


class BalancedExperts(Family):
    """The loss that balances experts is trained only with output_router_logits, as in transformers,
    whatever its coefficient.
    """

    def read(self, source: ConfigJson) -> GPTConfig:
        # Here, since a coefficient of 0 must stay allowed
        source = source.with_keys(**{"router_aux_loss_coef": 0.001} | source)
        if not source.get("output_router_logits"):
            source = source.with_keys(router_aux_loss_coef=0.0)
        return super().read(source)

    def changed(self, config: GPTConfig) -> dict[str, Any]:
        balance = config.experts.balance
        balanced = {"router_aux_loss_coef": balance, "output_router_logits": balance > 0}
        return super().changed(config) | balanced


class Qwen3Moe(BalancedExperts):
    """Experts in some layers."""

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        every, dense = source.size("decoder_sparse_step"), source.get("mlp_only_layers") or []
        others = [n for n in range(layers) if n in dense or (n + 1) % every]
        return super().read_features(source, layers) | {"experts.dense_layers": others}

    def write_new(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_new(config) | {"mlp_only_layers": config.experts.dense_layers}


class Qwen2Moe(Qwen3Moe):
    """A shared expert computes every token; its width is a multiple of that of the others."""

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        names = "shared_expert_intermediate_size", "moe_intermediate_size"
        (all_of_them, one), (name, divisor) = map(source.size, names), names
        if all_of_them % one:
            raise source.error(f"{name}={all_of_them} must be a multiple of {divisor}={one}")
        return super().read_features(source, layers) | {"experts.shared": all_of_them // one}


class GptOss(BalancedExperts):
    """Experts in one tensor, in MXFP4 too, and windows in every second layer."""

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


class Glm4Moe(Family):
    """The layers behind the last one, which predict further tokens, are left out."""

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"qk_norm": "head" if source.flag("use_qk_norm") else "none"}

    def changed(self, config: GPTConfig) -> dict[str, Any]:
        return super().changed(config) | {"num_nextn_predict_layers": 0}

    def leaves_out(self, tensor: str, config: GPTConfig) -> bool:
        layer = tensor.removeprefix("model.layers.").partition(".")[0]
        return layer.isdecimal() and int(layer) >= config.layers


class Afmoe(Family):
    """The embedding may be scaled."""

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        factor = source.size("hidden_size") ** 0.5 if source.flag("mup_enabled") else 1.0
        return {"multipliers.embedding": factor}
