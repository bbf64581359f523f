"""Code of families with layers of the gated delta rule between those of attention. families.toml
has what tables can say.

In Qwen3.5 and Qwen3-Next q_proj has the queries and the gate of each head. Qwen3-Next has experts,
and two tensors for all that enters the delta rule, sorted by key heads. In OLMo-Hybrid norms come
after attention, and before the delta rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from longctx.hf.families.config_json import ConfigJson
from longctx.hf.families.experts import Qwen2Moe
from longctx.hf.families.family import FULL, Family
from longctx.hf.families.folds import Share
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import Piece

RECURRENT = "linear_attention"
# Keys of config.json → options of the mixer
MAMBA = {"mamba_n_heads": "heads", "mamba_d_head": "head_size"}
MAMBA |= {"mamba_d_state": "state", "mamba_n_groups": "groups"}
OPTIONS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_size",
    "linear_value_head_dim": "value_size",
}


class HybridFamily(Family):
    """Layers of a mixer by layer_types, else all but every fourth."""

    mixer: ClassVar[str] = "gdn"
    options: ClassVar[dict[str, str]] = OPTIONS

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        kinds = source.layer_types(layers, [RECURRENT])
        recurrent = self.default_windowed(source, layers)
        if kinds is not None:
            recurrent = [n for n, kind in enumerate(kinds) if kind != FULL]
        mixers = [self.mixer if n in recurrent else "softmax" for n in range(layers)]
        repeats = (n for n in range(1, layers) if mixers[n:] == mixers[:-n])
        options = {ours: source.size(key) for key, ours in self.options.items()}
        return {
            "mixer": mixers[: next(repeats, layers)],
            "mixer_options": {self.mixer: options} if recurrent else {},
        }

    def read_windowed(self, source: ConfigJson, layers: int) -> list[int]:
        return []

    def read_keys(self) -> set[str]:
        return super().read_keys() | self.options.keys()


class Qwen35(HybridFamily):
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


class GraniteHybrid(HybridFamily):
    """Layers of Mamba-2; all by default. Logits are divided by a number."""

    mixer, options = "mamba2", MAMBA

    def read(self, source: ConfigJson) -> GPTConfig:
        kinds = {"mamba": RECURRENT, "attention": FULL}
        layers = [kinds.get(kind, kind) for kind in source.get("layer_types") or []] or None
        source = source.with_keys(**self.defaults | source | {"layer_types": layers})
        heads, size = source.size("mamba_n_heads"), source["mamba_d_head"]
        width = source.size("mamba_expand") * source.size("hidden_size")
        size = width // heads if size == "auto" else size
        source.refuse_unless("mamba_n_heads · mamba_d_head", heads * size, (width,))
        return super().read(source.with_keys(mamba_d_head=size))

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        is_rotated = source.get("position_embedding_type") == "rope"
        logits = {"multipliers.logits": 1 / source.number("logits_scaling", 1.0)}
        nope = {"nope_layers": [] if is_rotated else list(range(layers))}
        return super().read_features(source, layers) | logits | nope

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        heads, size, state, groups = config.mixer_options.get("mamba2", {}).values() or (0,) * 4
        inner = heads * size, groups * state, groups * state
        sizes = {"in_proj": (heads * size, *inner, heads), "conv1d": inner}
        # Parts of a tensor in their order
        for piece in sorted(super().tensors(config), key=attrgetter("theirs")):
            layer, _, name = piece.theirs.rpartition(".mamba.")
            tensor, _, part = name.partition(".")
            if tensor in sizes:
                number, _, ending = part.partition(".")
                rows = sum(sizes[tensor])
                piece = piece._replace(
                    theirs=f"{layer}.mamba.{tensor}.{ending}",
                    shape=(rows, *piece.shape[1:]),
                    fold=Share(sizes[tensor], int(number)),
                )
            yield piece


# Names of norms in its folders, for layers of the delta rule and of attention
RECURRENT_NORMS = {"input_layernorm": "attention_layer_norm"}
RECURRENT_NORMS |= {"post_attention_layernorm": "feedforward_layer_norm"}
ATTENTION_NORMS = {"feedforward_layer_norm": "post_attention_layernorm"}


class OlmoHybrid(HybridFamily):
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
            yield piece._replace(theirs=self.named(piece.theirs, config))

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
