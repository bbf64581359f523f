"""Code of families with layers of the gated delta rule between those of attention. families.toml
has what tables can say.

In Qwen3.5 and Qwen3-Next q_proj has the queries and the gate of each head. Qwen3-Next has experts,
and two tensors for all that enters the delta rule, sorted by key heads. In OLMo-Hybrid norms come
after attention, and before the delta rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.experts import Qwen2Moe
from longctx.hf.families.family import FULL, Family
from longctx.hf.families.folds import Share
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import Piece

RECURRENT = "linear_attention"
# Keys of config.json → options of the mixer
OPTIONS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_size",
    "linear_value_head_dim": "value_size",
}


class DeltaFamily(Family):
    """Layers of the gated delta rule by layer_types, else all but every fourth."""

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        kinds = source.layer_types(layers, [RECURRENT])
        recurrent = self.default_windowed(source, layers)
        if kinds is not None:
            recurrent = [n for n, kind in enumerate(kinds) if kind != FULL]
        mixers = ["gdn" if n in recurrent else "softmax" for n in range(layers)]
        repeats = (n for n in range(1, layers) if mixers[n:] == mixers[:-n])
        options = {ours: source.size(key) for key, ours in OPTIONS.items()}
        return {
            "mixer": mixers[: next(repeats, layers)],
            "mixer_options": {"gdn": options} if recurrent else {},
        }

    def read_windowed(self, source: ConfigJson, layers: int) -> list[int]:
        return []

    def read_keys(self) -> set[str]:
        return super().read_keys() | OPTIONS.keys()


class Qwen35(DeltaFamily):
    """Attention has a gate, and positions may have three coordinates, which are equal in text."""

    def read(self, source: ConfigJson) -> GPTConfig:
        rope = dict(source.get(source.rope_key) or {})
        text = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
        return super().read(source.with_keys(**{source.rope_key: text}))

    def leaves_out(self, tensor: str, config: GPTConfig) -> bool:
        return tensor.startswith("mtp.")

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        sizes = config.head_size, config.head_size
        for piece in super().tensors(config):
            layer, _, name = piece.theirs.rpartition(".self_attn.")
            if name in ("q_proj.weight", "gate_proj.weight"):
                (rows, columns), is_gate = piece.shape, name.startswith("gate")
                piece = piece._replace(
                    theirs=f"{layer}.self_attn.q_proj.weight",
                    shape=(2 * rows, columns),
                    fold=Share(sizes, int(is_gate)),
                )
            yield piece


class Qwen35Moe(Qwen2Moe, Qwen35):
    """Experts in all layers, so there is one width."""

    def read(self, source: ConfigJson) -> GPTConfig:
        width = (self.defaults | source)["moe_intermediate_size"]
        return super().read(source.with_keys(intermediate_size=width))


class Qwen3Next(Qwen2Moe, Qwen35):
    """Queries, keys, values and gate of each key head are rows side by side, as β and decay are."""

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        for piece in super().tensors(config):
            layer, _, name = piece.theirs.rpartition(".linear_attn.in_proj_")
            if not layer:
                yield piece
                continue
            options = config.mixer_options["gdn"]
            key_heads, value_heads, key, value = map(options.get, OPTIONS.values())
            each = value_heads // key_heads  # value heads of a key head
            inputs, rates = ("qkvz", (key, key, each * value, each * value)), ("ba", (each, each))
            (tensor, sizes), numbers = {
                "qkv.weight": (inputs, (0, 1, 2)),
                "z.weight": (inputs, (3,)),
                "b.weight": (rates, (0,)),
                "a.weight": (rates, (1,)),
            }[name]
            first = piece.first
            for number in numbers:
                yield piece._replace(
                    theirs=f"{layer}.linear_attn.in_proj_{tensor}.weight",
                    first=first,
                    shape=(key_heads * sum(sizes), piece.shape[1]),
                    fold=Share(sizes, number),
                )
                first += key_heads * sizes[number]


# Names of norms in its folders, for layers of the delta rule and of attention
RECURRENT_NORMS = {"input_layernorm": "attention_layer_norm"}
RECURRENT_NORMS |= {"post_attention_layernorm": "feedforward_layer_norm"}
ATTENTION_NORMS = {"feedforward_layer_norm": "post_attention_layernorm"}


class OlmoHybrid(DeltaFamily):
    """The state may have negative eigenvalues; without a rope_theta there are no positions."""

    def read(self, source: ConfigJson) -> GPTConfig:
        given = {key: value for key, value in source.items() if value is not None}
        heads = source.size("num_attention_heads")
        missing = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
        source = source.with_keys(**missing | given)
        size = int(0.75 * source.size("hidden_size") / source.size("linear_num_key_heads"))
        source = source.with_keys(**{"linear_key_head_dim": size} | given)
        twice = 2 * source.size("linear_key_head_dim")
        return super().read(source.with_keys(**{"linear_value_head_dim": twice} | given))

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

    def named(self, tensor: str, config: GPTConfig) -> str:
        layer = tensor.removeprefix("model.layers.").partition(".")[0]
        if not layer.isdecimal():
            return tensor
        is_recurrent = config.mixer_of(int(layer)) == "gdn"
        names = RECURRENT_NORMS if is_recurrent else ATTENTION_NORMS
        return ".".join(names.get(word, word) for word in tensor.split("."))

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        for piece in super().tensors(config):
            layer, _, name = piece.theirs.rpartition(".linear_attn.")
            if name not in ("in_proj_qkv.weight", "conv1d.weight"):
                yield piece._replace(theirs=self.named(piece.theirs, config))
                continue
            options, first = config.mixer_options["gdn"], 0
            keys, values = (options[f"{x}_heads"] * options[f"{x}_size"] for x in ("key", "value"))
            for letter, rows in zip("qkv", (keys, keys, values), strict=True):
                theirs = f"{layer}.linear_attn.{letter}_{name.replace('in_proj_qkv', 'proj')}"
                shape = rows, *piece.shape[1:]
                yield piece._replace(theirs=theirs, first=first, shape=shape)
                first += rows

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
