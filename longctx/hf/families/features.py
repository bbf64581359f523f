"""Code of families whose layers are all of attention. families.toml has what tables can say.

SmolLM3 has layers without rotary positions. In Ministral 3 queries grow with their position. Qwen's
windows are in the upper layers. In GLM-4 half of a head rotates, in pairs (2i, 2i + 1). They are
folded at load: here a channel rotates with the one half of them further on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.config.rope_config import KEYS, ORIGINAL
from longctx.hf.families.config_json import QWEN2_SPLIT, ConfigJson
from longctx.hf.families.family import Family, TwoRopes
from longctx.hf.families.folds import Interleaved
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import Piece


class SmolLM3(Family):
    """Layers without rotation, which have no window either by default."""

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"nope_layers": self.default_windowed(source, layers)}

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        """Return the layers without rotation: 0 in no_rope_layers, by default every fourth."""
        flags = source.get("no_rope_layers")
        if flags is None:
            every = source.size("no_rope_layer_interval")
            return list(range(every - 1, layers, every))
        return [n for n in range(layers) if not flags[n]]


class HunYuanDenseV1(Family):
    """A "dynamic" rope with an alpha is a larger base for every length."""

    def read(self, source: ConfigJson) -> GPTConfig:
        theta, scaling = source.rope()
        if scaling.get("rope_type") == "dynamic" and scaling.get("alpha") is not None:
            size = source.size("head_dim")
            theta *= ConfigJson(source.file, scaling).number("alpha", 1) ** (size / (size - 2))
            source = source.with_keys(rope_parameters={"rope_theta": theta}, rope_scaling=None)
        return super().read(source)


# Keys of layers without a window in Gemma 4, and of its experts → those of GPTConfig
HEADS = {"head_dim": "full_head_dim", "num_key_value_heads": "full_kv_heads"}
EXPERTS = {"num_experts": "count", "top_k_experts": "per_token", "moe_intermediate_size": "ffn"}
BETA = "llama_4_scaling_beta"


class Ministral3(Family):
    """The growth is among the rope_parameters, with the length that both share."""

    def read(self, source: ConfigJson) -> GPTConfig:
        place, rope = source.rope_key, source.get(source.rope_key) or self.rope
        # as transformers fills it in
        length = rope.get(ORIGINAL, source.get("max_position_embeddings"))
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        left_out = {BETA, "max_position_embeddings"}
        if kind in KEYS and ORIGINAL not in KEYS[kind][0]:
            left_out.add(ORIGINAL)
        rest = {key: value for key, value in rope.items() if key not in left_out}
        keys = {place: rest, BETA: rope.get(BETA) or 0.0, ORIGINAL: length}
        return super().read(source.with_keys(**keys))

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        return {"query_growth": [source.number(BETA), float(source.size(ORIGINAL))]}

    def beside(self, config: GPTConfig) -> dict[str, Any]:
        """Return the keys among the rope_parameters besides RoPE's."""
        beta, tokens = config.query_growth
        return {BETA: beta, ORIGINAL: int(tokens)}

    def write_rope(self, config: GPTConfig) -> dict[str, Any]:
        keys, more = super().write_rope(config), self.beside(config)
        return {key: x | more if isinstance(x, dict) else x for key, x in keys.items()}


class UpperWindows(Family):
    """Windows by layer_types, else in the layers from max_window_layers on."""

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        return range(max(0, source.get("max_window_layers", 28)), layers)


class Qwen2(UpperWindows):
    """A tokenizer of its own."""

    def check_tokenizer(self, file: Path) -> None:
        described = untrusted.read_settings(file, untrusted.TOKENIZER_SIZE)
        splitting = described.get("pre_tokenizer") or {}
        first = (splitting.get("pretokenizers") or [{}])[0]
        pattern = (first.get("pattern") or {}).get("Regex")
        if pattern != QWEN2_SPLIT or described.get("normalizer") != {"type": "NFC"}:
            problem = "does not normalize and split text as Qwen2 does, but transformers opens"
            problem += " a model with model.qkv_bias=true so: its tokens would be others"
            raise ValueError(f"{file}: {problem}")


class Paired(Family):
    """Rotary pairs are folded."""

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        fold = Interleaved(config.head_size, config.rotary_size)
        for piece in super().tensors(config):
            is_rotated = piece.theirs.split(".")[-2] in ("q_proj", "k_proj")
            yield piece._replace(fold=fold) if is_rotated else piece


class GptNeox(Family):
    """One tensor has q, k and v of each head side by side."""

    def read(self, source: ConfigJson) -> GPTConfig:
        size = source.size("hidden_size") // source.size("num_attention_heads")
        source.refuse_unless("head_dim", source.get("head_dim"), (size, None))
        share, theta = source.number("rotary_pct", 0.25), source.number("rotary_emb_base", 1e4)
        keys = {"partial_rotary_factor": share, "rope_theta": theta, "num_key_value_heads": None}
        return super().read(source.with_keys(**keys))

    def shares(self, config: GPTConfig) -> dict[str, Sequence[int]]:
        return {"attention.query_key_value": (config.head_size,) * 3}

    def write_rope(self, config: GPTConfig) -> dict[str, Any]:
        rope = super().write_rope(config)
        rope["rope_parameters"]["partial_rotary_factor"] = config.rotary_share
        return rope | {"rotary_pct": config.rotary_share, "rotary_emb_base": config.rope_theta}


class BalancedExperts(Family):
    """Experts are balanced only with output_router_logits, as in transformers."""

    def read(self, source: ConfigJson) -> GPTConfig:
        # Here, since a coefficient of 0 must stay allowed
        off = {} if source.get("output_router_logits") else {"router_aux_loss_coef": 0.0}
        return super().read(source.with_keys(**off))

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


class Gemma4(TwoRopes):
    """Layers without a window have heads of their own; the last layer is one."""

    def read_windowed(self, source: ConfigJson, layers: int) -> list[int]:
        return [n for n in super().read_windowed(source, layers) if n < layers - 1]

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        windowed = self.read_windowed(source, layers)
        own_heads = {"head_dim": source.size("global_head_dim")}
        if source.flag("attention_k_eq_v") and source.get("num_global_key_value_heads") is not None:
            own_heads["num_key_value_heads"] = source.size("num_global_key_value_heads")
        if "per_layer_config" in source:  # of the others transformers makes it
            per_layer = source["per_layer_config"] or {}
            own_heads = next(iter(per_layer.values()), {})
            each = {str(n): own_heads for n in range(layers) if own_heads and n not in windowed}
            source.refuse_unless("per_layer_config", per_layer, (each,))
        others = sorted(own_heads.keys() - HEADS.keys())
        source.refuse_unless("per_layer_config", others, ([],))
        experts = EXPERTS if source.flag("enable_moe_block") else {}
        sizes = {f"experts.{ours}": source.size(key) for key, ours in experts.items()}
        return {HEADS[key]: value for key, value in own_heads.items()} | sizes

    def write_rope(self, config: GPTConfig) -> dict[str, Any]:
        # transformers would take older keys for the parameters of each kind
        return {"rope_parameters": super().write_rope(config)["rope_parameters"]}


class Afmoe(Family):
    """The embedding may be scaled."""

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        factor = source.size("hidden_size") ** 0.5 if source.flag("mup_enabled") else 1.0
        return {"multipliers.embedding": factor}
