"""Code of families with layers of other mixers. Tables are in families.toml, also the tensors that
are parts of one: TENSOR.0.weight, TENSOR.1.weight.

In Qwen3.5 and Qwen3-Next q_proj has the queries and the gate of each head. Qwen3-Next has two
tensors for all that enters the delta rule, sorted by key heads; Granite 4 has one for all of
Mamba-2. In OLMo-Hybrid norms come after attention, and before the delta rule. With latent attention
a head has channels without positions, then rotary ones in pairs (2i, 2i + 1), which are folded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, nextafter
from typing import Any, Self

from longctx.config.rope_config import SHARE
from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.family import FULL, PARTS, Family
from longctx.hf.families.features import BalancedExperts, Ministral3, Qwen3Moe
from longctx.hf.families.folds import Interleaved, OfHeads
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import Piece

RECURRENT = "linear_attention"
OF_EXPERTS = re.compile(r"experts\.(?!balance)")  # keys of GPTConfig without effect on an MLP
LAYER = re.compile(r"\.layers\.(\d+)(\.next)?\.")


class HybridFamily(Family):
    """Layers of a mixer by layer_types, else all but every fourth."""

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        kinds = source.kinds("layer_types", layers, FULL, RECURRENT)
        recurrent = self.default_windowed(source, layers)
        if kinds is not None:
            recurrent = [n for n, kind in enumerate(kinds) if kind != FULL]
        mixer, other = self.mixers
        mixers = [mixer if n in recurrent else other for n in range(layers)]
        repeats = (n for n in range(1, layers) if mixers[n:] == mixers[:-n])
        options = {ours: source.size(key) for key, ours in self.options.items()}
        found = super().read_features(source, layers)
        of_mixers = found.get("mixer_options", {}) | ({mixer: options} if recurrent else {})
        return found | {"mixer": mixers[: next(repeats, layers)], "mixer_options": of_mixers}

    def read_windowed(self, source: ConfigJson, layers: int) -> list[int]:
        return []


class Qwen35(HybridFamily):
    """Attention has a gate."""

    def shares(self, config: GPTConfig) -> dict[str, Sequence[int]]:
        return {"self_attn.q_proj": (config.head_size,) * 2}


class Qwen35Moe(Qwen3Moe, Qwen35):
    """Experts in all layers, in one tensor or in many."""

    def tensors_of(self, config: GPTConfig, stored: Mapping[str, Any]) -> Iterator[Piece]:
        is_stacked = any(name.endswith(".mlp.experts.down_proj") for name in stored)
        joined = replace(self, experts=PARTS["joined_experts"]["experts"])
        return (joined if is_stacked else self).tensors(config)


class Qwen3Next(Qwen3Moe, Qwen35):
    """Queries, keys, values and gate of each key head are rows side by side, as β and decay are."""

    def shares(self, config: GPTConfig) -> dict[str, Sequence[int]]:
        parts = super().shares(config)
        for key_heads, value_heads, key, value in map(dict.values, config.mixer_options.values()):
            each = value_heads // key_heads  # value heads of a key head
            parts["linear_attn.in_proj_qkvz"] = key, key, each * value, each * value
            parts["linear_attn.in_proj_ba"] = each, each
        return parts


class Mamba(HybridFamily):
    """Layers of Mamba-2, and experts or none."""

    def read(self, source: ConfigJson) -> GPTConfig:
        if "mamba_d_head" in self.options:
            heads, size = source.size("mamba_n_heads"), source["mamba_d_head"]
            width = source.size("mamba_expand") * source.size("hidden_size")
            width = source.get("mamba_d_ssm") or width
            size = width // heads if size == "auto" else size
            source.refuse_unless("mamba_n_heads · mamba_d_head", heads * size, (width,))
            source = source.with_keys(mamba_d_head=size)
        return super().read(source)

    def without_experts(self) -> Self:
        """Return the same for a model without experts, whose keys change nothing."""

        def without(table: Mapping[str, Any]) -> Any:
            return {key: own for key, own in table.items() if not OF_EXPERTS.search(f"{key} {own}")}

        names = "fixed", "sizes", "numbers", "flags"
        tables = {name: without(getattr(self, name)) for name in names}
        return replace(self, **tables, shared=(), harmless=[*self.harmless, *self.read_keys()])

    def shares(self, config: GPTConfig) -> dict[str, Sequence[int]]:
        parts, folder = dict[str, Sequence[int]](), self.name_of("mamba")
        for heads, size, state, groups, *_ in map(dict.values, config.mixer_options.values()):
            parts[f"{folder}.conv1d"] = inner = heads * size, groups * state, groups * state
            parts[f"{folder}.in_proj"] = heads * size, *inner, heads
        return parts


class GraniteHybrid(Mamba, BalancedExperts):
    """By default no other layers; positions in none of attention, or in all. Without experts the
    shared one is an MLP.
    """

    def read(self, source: ConfigJson) -> GPTConfig:
        family = self.without_experts() if source.get("num_local_experts") == 0 else self
        return super(GraniteHybrid, family).read(source)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        without = 0 if source.get("position_embedding_type") == "rope" else layers
        found = super().read_features(source, layers) | {"nope_layers": list(range(without))}
        return found if "softmax" in found["mixer"] else found | {"attention_scale": None}


KINDS_BY_LETTER = {"M": RECURRENT, "*": FULL, "-": "mlp", "E": "moe"}


class NemotronH(Mamba):
    """A layer is Mamba-2 or attention, or an MLP or experts, which are of the same block here as
    the layer before. There are no positions.
    """

    def read(self, source: ConfigJson) -> GPTConfig:
        letters = source.get("hybrid_override_pattern") or "ME*-"
        pattern = [KINDS_BY_LETTER[letter] for letter in letters]
        found = source.get("layers_block_type") or source.get("layer_types") or pattern
        source = source.with_keys(layers_block_type=found)
        kinds = source.kinds("layers_block_type", len(found), *KINDS_BY_LETTER.values()) or []
        mixers = [layer for layer, kind in enumerate(kinds) if kind in (FULL, RECURRENT)]
        for layer in {*range(len(kinds))}.difference(mixers, (mixer + 1 for mixer in mixers)):
            problem = f"layers_block_type[{layer}]={kinds[layer]} follows no Mamba-2 or attention"
            raise source.error(f"{problem}; transformers=always may compute it")
        after = ["" if mixer + 1 in mixers else [*kinds, ""][mixer + 1] for mixer in mixers]
        family = self if "moe" in after else self.without_experts()
        unused: Any = dict.fromkeys(("layers_block_type", "rope_scaling", "rope_parameters"))
        unused |= {"n_shared_experts": 1, "num_hidden_layers": len(mixers)}
        own = {"layer_types": [kinds[mixer] for mixer in mixers], "_after": after}
        return super(NemotronH, family).read(source.with_keys(**unused, **own))

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        found, after = super().read_features(source, layers), source["_after"]
        for options in found["mixer_options"].values():
            options["least_step"] = source.number("time_step_min", 0.0)
        if "moe" in after:
            found["experts.dense_layers"] = [n for n, kind in enumerate(after) if kind == "mlp"]
        return found | {"no_mlp": [block for block, kind in enumerate(after) if not kind]}

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        # Layers before a block: one for each mixer, and one for each MLP
        firsts = [2 * n - sum(other < n for other in config.no_mlp) for n in range(config.layers)]

        def numbered(found: re.Match[str]) -> str:
            return f".layers.{firsts[int(found[1])] + bool(found[2])}."

        for piece in super().tensors(config):
            yield piece._replace(theirs=LAYER.sub(numbered, piece.theirs))


class FalconH1(Mamba):
    """Every layer is attention next to Mamba-2. Its factors are moved to where GPT has some."""

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        names = "attention_in", "attention_out", "key", "ssm_in", "ssm_out"
        numbers = (source.number(f"{name}_multiplier", 1.0) for name in names)
        attention_in, attention_out, keys, ssm_in, ssm_out = numbers
        # silu(f g) u is that of an input times f, over f
        mlp, ssm = (source.get(f"{name}_multipliers") or [1.0] * 5 for name in ("mlp", "ssm"))
        gate, residual = mlp[0], mlp[1] / mlp[0]
        z, x, B, C, rate = (ssm_in * source.above_0("ssm_multipliers", ssm[n]) for n in range(5))
        options = {ours: source.size(key) for key, ours in self.options.items()}
        options |= {"C_factor": C, "B_factor": B, "x_factor": x, "rate_factor": rate}
        options |= {"gate_factor": z, "out_factor": ssm_out / residual}
        options["attention_factor"] = attention_in * attention_out / residual
        size = source.get("head_dim") or source["hidden_size"] // source["num_attention_heads"]
        return {
            "mixer_options": {"falcon": options},
            "attention_scale": attention_in**2 * keys * size**-0.5,
            "multipliers.residual": residual,
            "multipliers.mlp": gate,
        }


class OlmoHybrid(HybridFamily):
    """The state may have negative eigenvalues; without a rope_theta there are no positions."""

    def read(self, source: ConfigJson) -> GPTConfig:
        heads = source.size("num_attention_heads")
        keys = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
        keys |= {key: value for key, value in source.items() if value is not None}
        size = int(0.75 * source.size("hidden_size") / keys["linear_num_key_heads"])
        keys = {"linear_key_head_dim": size} | keys
        keys = {"linear_value_head_dim": 2 * keys["linear_key_head_dim"]} | keys
        return super().read(source.with_keys(**keys))

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        features = super().read_features(source, layers)
        if options := features["mixer_options"].get("gdn"):
            options["negative"] = source.flag("linear_allow_neg_eigval")
            options["norm_eps"] = 1e-5  # whatever rms_norm_eps says, as in transformers
        theta = (source.get(source.rope_key) or {}).get("rope_theta", "default")
        return features | {"nope_layers": list(range(layers)) if theta is None else []}

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        recurrent = super().default_windowed(source, layers)
        return recurrent if len(recurrent) < layers else recurrent[:-1]

    def tensors_of(self, config: GPTConfig, stored: Mapping[str, Any]) -> Iterator[Piece]:
        # transformers saves the convolutions in thirds, whatever the widths of q, k and v
        total = {x.ours: x.rows.stop for x in self.tensors(config) if "_conv1d." in x.theirs}
        for piece in self.tensors(config):
            rows = -(-total.get(piece.ours, 0) // 3)
            layer, _, name = piece.theirs.rpartition(".linear_attn.")
            first = {"q_conv1d.weight": 0, "k_conv1d.weight": rows, "v_conv1d.weight": 2 * rows}
            queries = stored.get(f"{layer}.linear_attn.q_conv1d.weight")
            if name in first and queries is not None and queries.shape[0] == rows:
                third = min(rows, total[piece.ours] - first[name])
                piece = piece._replace(first=first[name], shape=(third, *piece.shape[1:]))
            yield piece


class Latent(Family):
    """Latent attention in every layer."""

    def read(self, source: ConfigJson) -> GPTConfig:
        names = "qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads"
        size, rotary, heads = map(source.size, names)
        # As transformers writes them
        for name, value in {"head_dim": rotary, "num_key_value_heads": heads}.items():
            source.refuse_unless(name, source.get(name), (value, None))
        return super().read(source.with_keys(head_dim=size))

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        size, rotary = source.size("qk_nope_head_dim"), source.size("qk_rope_head_dim")
        ranks = {"kv_rank": source.size("kv_lora_rank"), "value_size": source.size("v_head_dim")}
        if source.get("q_lora_rank") is not None:
            ranks["q_rank"] = source.size("q_lora_rank")
        # The product with the size is rounded down
        share = rotary / size
        share = share if int(size * share) == rotary else nextafter(share, inf)
        features = {"mixer_options": {"mla": ranks}, "rotary_share": share}
        return super().read_features(source, layers) | features

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        ranks, rotary = config.mixer_options["mla"], config.rotary_size
        firsts = {"kv_a_proj_with_mqa": ranks["kv_rank"]}
        firsts |= dict.fromkeys(("q_proj", "q_b_proj"), config.head_size)
        # Without rotation pairs are as good in any order
        firsts = {} if config.nope_layers else firsts
        for piece in super().tensors(config):
            if "q_rank" not in ranks:
                piece = piece._replace(theirs=piece.theirs.replace("q_a_proj", "q_proj"))
            if first := firsts.get(piece.theirs.split(".")[-2]):
                piece = piece._replace(fold=Interleaved(first + rotary, rotary, first))
            yield piece


class DeepseekV2(Latent):
    """Experts are chosen among all, or those of some groups."""

    def read(self, source: ConfigJson) -> GPTConfig:
        if source.get("topk_method") in (None, "greedy"):
            source = source.with_keys(n_group=1, topk_group=1)
        return super().read(source)


class Mistral4(Latent, Ministral3):
    """Rotary channels are a share of all, which is among the rope_parameters."""

    def read(self, source: ConfigJson) -> GPTConfig:
        rotary = source.size("qk_rope_head_dim")
        size, place = rotary + source.size("qk_nope_head_dim"), source.rope_key
        parameters = dict(source.get(place) or self.rope)
        channels = int(size * parameters.pop(SHARE, rotary / size))
        source.refuse_unless(f"qk_head_dim · {place}.{SHARE}", channels, (rotary,))
        source.refuse_unless("head_dim", source.get("head_dim"), (size, None))
        return super().read(source.with_keys(**{place: parameters, "head_dim": None}))

    def beside(self, config: GPTConfig) -> dict[str, Any]:
        channels = config.rotary_size + config.head_size
        return super().beside(config) | {SHARE: config.rotary_size / channels}


class KimiLinear(HybridFamily, Latent):
    """Kimi Delta Attention, and latent attention without positions in other layers."""

    def read(self, source: ConfigJson) -> GPTConfig:
        # Unused, but checked by transformers
        source.refuse_unless("head_dim % 2", (source.get("head_dim") or 0) % 2, (0,))
        # As the Hub's folders have them, with layers from 1
        if own := source.get("linear_attn_config"):
            layers = range(1, source.size("num_hidden_layers") + 1)
            kinds = [FULL if n in own["full_attn_layers"] else RECURRENT for n in layers]
            source = source.with_keys(
                linear_num_heads=own["num_heads"],
                linear_head_dim=own["head_dim"],
                linear_conv_kernel_dim=own["short_conv_kernel_size"],
                layer_types=source.get("layer_types") or kinds,
            )
        # There are no positions
        unused = dict.fromkeys(("head_dim", "rope_scaling", "rope_parameters"))
        return super().read(source.with_keys(**unused))

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        return [n for n in range(layers) if n == 0 or n % 4]

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        for piece in super().tensors(config):
            if piece.theirs.endswith("A_log"):
                piece = piece._replace(shape=(1, 1, *piece.shape, 1), fold=OfHeads())
            yield piece
