"""What a model family is: one `model_type` of transformers, and the GPTConfig that it stands for.

A family is a table of families.toml. If it needs code, the table names a class. Reading, loading
and writing of folders ask the registry and name no family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.config.rope_config import check_scaling
from longctx.hf.families.config_json import TABLES, ConfigJson
from longctx.hf.families.folds import Share, Stacked
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import BlockSpec, Piece

HARMLESS = frozenset(TABLES.pop("harmless").split())
SHARED = frozenset(TABLES.pop("shared").split())
PARTS = TABLES.pop("parts")
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
PART = re.compile(r"(.*\.layers\.\d+\.)(.*)\.(\d)(\.weight|\.bias)")
FULL, WINDOWED = "full_attention", "sliding_attention"  # kinds of layers
# Name in a table → our number, of that in config.json
FUNCTIONS: dict[str, Callable[[float], float]] = {
    "inverse": lambda x: 1 / x,
    "root": lambda x: x**0.5,
    "inverse root": lambda x: x**-0.5,
}
BEHIND = {"num_nextn_predict_layers", "num_mtp_layers"}  # layers that `further` leaves out


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers; the methods hold for a model like Llama. The head of
    families.toml describes the fields.
    """

    model_type: str
    class_name: str
    code: str = "family:Family"
    fixed: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, Sequence[Any]] = field(default_factory=dict)
    flags: dict[str, Sequence[str]] = field(default_factory=dict)
    choices: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    full_every: int | str | None = None
    full_nope: str = ""
    thetas: Sequence[float] = ()
    dense: Sequence[str] = ()
    computed: Sequence[str] = ()
    further: str = ""
    keys: Sequence[str] = ()
    harmless: Sequence[str] = ()
    covered: dict[str, Sequence[Any]] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    alike: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    rope_types: Sequence[str] = ()
    experts: dict[str, str] = field(default_factory=dict)
    turned: bool = False
    shared: Sequence[str] = ()
    mixers: Sequence[str] = ()
    options: dict[str, str] = field(default_factory=dict)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        """Return the keys of GPTConfig that no table holds, but for windows."""
        return {}

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        """Return the layers with a window if config.json has no layer_types."""
        every = self.full_every
        every = source.size(every) if isinstance(every, str) else every
        return range(layers) if every is None else [n for n in range(layers) if (n + 1) % every]

    def check_tokenizer(self, file: Path) -> None:
        """Raise ValueError for a tokenizer.json that transformers would not use for this family."""

    def leaves_out(self, tensor: str, config: GPTConfig) -> bool:
        """Return True for a tensor of its folders that is not of `config`, and changes nothing."""
        layer = tensor.removeprefix("model.layers.").partition(".")[0]
        is_behind = layer.isdecimal() and int(layer) >= config.layers
        is_further = is_behind if self.further == "layers" else layer == self.further
        return is_further or tensor.endswith(tuple(self.computed))

    def named(self, tensor: str) -> str:
        """Return transformers' name of a tensor, of any that folders have for it."""
        return ".".join(self.alike.get(word, word) for word in tensor.split("."))

    def name_of(self, tensor: str) -> str:
        """Return the name of a tensor by the `names` of this family."""
        tensor = f".{tensor}."
        for ours, own in self.names.items():
            tensor = tensor.replace(f".{ours}.", f".{own}.")
        return tensor[1:-1]

    def shares(self, config: GPTConfig) -> dict[str, Sequence[int]]:
        """Return tensors of a layer that have parts → rows of each part in each head."""
        return {}

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        """Yield every tensor of its weights, as rows of a parameter of GPT."""
        sizes, pieces = self.shares(config), list[Piece]()
        for piece in self.whole(config):
            if found := PART.fullmatch(piece.theirs):
                layer, tensor, number, ending = found.groups()
                fold = Share(sizes[tensor], int(number))
                rows = piece.shape[0] // fold.sizes[fold.index] * sum(fold.sizes)
                shape = rows, *piece.shape[1:]
                piece = piece._replace(theirs=layer + tensor + ending, shape=shape, fold=fold)
            pieces.append(piece)
        # Parts of a tensor in their order
        yield from sorted(pieces, key=lambda piece: getattr(piece.fold, "index", 0))

    def whole(self, config: GPTConfig) -> Iterator[Piece]:
        """Yield the tensors as if each had one part."""
        embedding = config.vocab_size or 0, config.channels
        yield Piece(self.name_of(EMBEDDING), "embed.weight", 0, embedding)
        for n, block in enumerate(config.blocks):
            yield from self.renamed(block, n)
        for name, size in config.norm("norm", "norm").vectors:
            yield Piece(self.name_of(f"model.norm.{name}"), f"norm.{name}", 0, (size,))
        if not config.tied:
            yield Piece(self.name_of(LM_HEAD), "head.weight", 0, embedding)

    def tensors_of(self, config: GPTConfig, stored: Mapping[str, Any]) -> Iterator[Piece]:
        """Yield every tensor of a folder, which has these of their shapes."""
        return self.tensors(config)

    def renamed(self, block: BlockSpec, n: int) -> Iterator[Piece]:
        """Yield the tensors of layer `n` by the `names` of this family."""
        joined: dict[str, Piece] = {}
        for part in block.parts():
            part = replace(part, folder=self.parts.get(part.name, part.folder))
            for piece in part.pieces(f"model.layers.{n}", f"blocks.{n}"):
                theirs = self.name_of(piece.theirs)
                layer, is_of_expert, tensor = theirs.partition(".mlp.experts.")
                if is_of_expert and self.experts:
                    number, _, tensor = tensor.partition(".")
                    theirs = f"{layer}.{self.experts[tensor].format(number)}"
                piece = piece._replace(theirs=theirs)
                if before := joined.get(theirs):
                    rows = before.shape[0] + piece.shape[0]
                    piece = before._replace(shape=(rows, *piece.shape[1:]))
                joined[theirs] = piece
        for theirs, piece in joined.items():
            if theirs.removeprefix(f"model.layers.{n}.") in self.experts.values():
                is_paired = self.turned and "gate_up" in piece.ours
                fold = Stacked(block.linears["mlp.gate_up"].experts, self.turned, is_paired)
                piece = piece._replace(shape=fold.shape(piece.shape), fold=fold)
            yield piece

    def read(self, source: ConfigJson) -> GPTConfig:
        """Return the model of a config.json; ValueError names the first key that GPT lacks."""
        if self.rope and not (source.get("rope_parameters") or source.get("rope_scaling")):
            source = source.with_keys(rope_parameters=self.rope)
        for other, key in self.aliases.items():
            if source.get(other) is not None:
                source = source.with_keys(**{key: source.size(other)})
        covered = {key: (*values, None) for key, values in self.covered.items()}
        read = (self.read_keys() | SHARED) - covered.keys()
        source.refuse_uncovered(read, HARMLESS.union(self.harmless), covered)
        method = (source.get("quantization_config") or {}).get("quant_method", "mxfp4")
        source.refuse_unless("quantization_config.quant_method", method, ("mxfp4",))
        # Files from before grouped queries: every head has keys of its own
        if source.get("num_key_value_heads") is None:
            source = source.with_keys(num_key_value_heads=source.size("num_attention_heads"))
        layers, (theta, scaling) = source.size("num_hidden_layers"), source.rope()
        if self.rope_types:
            kind = scaling.get("rope_type", "default")
            source.refuse_unless(f"{source.rope_key}.rope_type", kind, tuple(self.rope_types))
        values = self.read_tables(source) | {"rope_theta": theta}
        # channels / heads is what null means, so an equal model has an equal config
        if source.get("head_dim") is not None:
            size = source.size("head_dim")
            values["head_dim"] = None if size * values["heads"] == values["channels"] else size
        windowed = self.read_windowed(source, layers)
        if self.full_nope == "always" or (self.full_nope and source.get("sliding_window")):
            values["nope_layers"] = [n for n in range(layers) if n not in windowed]
        values["window"] = source.size("sliding_window") if windowed else None
        values["window_layers"] = None if len(windowed) in (0, layers) else windowed
        if self.shared and source.get(self.shared[0]) != 0:
            (width, one), (name, divisor) = map(source.size, self.shared), self.shared
            if width % one:
                raise source.error(f"{name}={width} must be a multiple of {divisor}={one}")
            values["experts.shared"] = width // one
        if self.dense:
            key = next((key for key in self.dense if source.get(key) is not None), "")
            kinds = source.kinds(key, layers, "dense", "sparse") if key.endswith("types") else None
            kinds = kinds or ["dense"] * min(source[key] if key else 1, layers)
            values["experts.dense_layers"] = [n for n, x in enumerate(kinds) if x == "dense"]

        # Keys such as experts.count are those of a group
        config = GPTConfig()
        for name, value in (values | self.read_features(source, layers)).items():
            group, _, key = name.rpartition(".")
            setattr(attrgetter(group)(config) if group else config, key, value)
        # Checked apart, since its errors name the key of the file
        path = f"{source.file}: {source.rope_key}"
        check_scaling(path, scaling, config.rotary_size, config.context)
        config.rope_scaling = scaling
        with untrusted.named(source.file):
            config.validate()
        return config

    def read_tables(self, source: ConfigJson) -> dict[str, Any]:
        """Return the keys of GPTConfig that the tables of this family hold."""
        values = self.fixed | {ours: source.size(key) for key, ours in self.sizes.items()}
        values["rotary_share"] = source.rotary_share("partial_rotary_factor" in self.keys)
        for key, (ours, *others) in self.numbers.items():
            number = source.number(key, *others[:1])
            values[ours] = FUNCTIONS[others[1]](number) if others[1:] else number
        for key, (ours, known) in self.choices.items():
            value = source.get(key)
            value = json.dumps(value) if isinstance(value, bool) else str(value)
            source.refuse_unless(key, value, tuple(known))
            values[ours] = known[value]
        for key, names in self.flags.items():
            values |= dict.fromkeys(names, source.flag(key))
        return values

    def read_keys(self) -> set[str]:
        """Return the keys of config.json that this family reads and not all do."""
        every = self.full_every if isinstance(self.full_every, str) else ""
        tables = self.flags, self.sizes, self.numbers, self.choices, self.aliases, self.options
        return {*self.keys, *self.shared, *self.dense, every}.union(*tables)

    def read_windowed(self, source: ConfigJson, layers: int) -> list[int]:
        """Return the layers that have a window."""
        used = "use_sliding_window" not in self.keys or source.flag("use_sliding_window")
        used = used and "sliding_window" in self.keys and source.get("sliding_window") is not None
        kinds = source.kinds("layer_types", layers, *[FULL, WINDOWED][: 1 + used])
        if used and kinds is None:
            return list(self.default_windowed(source, layers))
        return [n for n, kind in enumerate(kinds or ()) if kind == WINDOWED]

    def changed(self, config: GPTConfig) -> dict[str, Any]:
        """Return keys of config.json that a run may change, beside its positions."""
        behind = BEHIND & config.source.keys() if self.further else ()
        return {"vocab_size": config.vocab_size, **dict.fromkeys(behind, 0)}

    def write_new(self, config: GPTConfig) -> dict[str, Any]:
        """Return config.json of a model that has no source, as far as the tables can say it."""
        tables: dict[str, Sequence[Any]] = {**self.flags, **self.numbers}
        # The first entry of a key in the tables is its key of GPTConfig
        own = self.sizes | {key: names[0] for key, names in tables.items()}
        # Experts without a width of their own have that of the dense layers
        config = replace(config, experts=replace(config.experts, ffn=config.expert_ffn))
        values = {key: attrgetter(ours)(config) for key, ours in own.items()}
        if config.experts.count is not None and "experts.ffn" not in self.sizes.values():
            values["intermediate_size"] = config.expert_ffn
        windows = map(config.window_of, range(config.layers))
        of_windows = {
            "use_sliding_window": config.window is not None,
            "sliding_window": config.window,
            "layer_types": [WINDOWED if window else FULL for window in windows],
        }
        values |= {key: x for key, x in of_windows.items() if key in self.keys}
        for key, (ours, known) in self.choices.items():
            text = next((text for text, x in known.items() if x == attrgetter(ours)(config)), None)
            values[key] = text == "true" if text in ("true", "false") else text
        return {
            "architectures": [f"{self.class_name}ForCausalLM"],
            "model_type": self.model_type,
            "hidden_act": "silu",
            **values,
            "head_dim": config.head_size,
            **self.changed(config),
            **self.write_rope(config),
        }

    def write_rope(self, config: GPTConfig) -> dict[str, Any]:
        """Return RoPE as transformers 5 names it (rope_parameters), and as older tools do."""
        base: dict[str, Any] = {"rope_theta": config.rope_theta}
        if config.rotary_share != 1 and "partial_rotary_factor" in self.keys:
            base["partial_rotary_factor"] = config.rotary_share
        scaling = dict(config.rope_scaling) or {"rope_type": "default"}
        older = scaling if config.rope_scaling else None
        return {"rope_parameters": scaling | base, **base, "rope_scaling": older}


class TwoRopes(Family):
    """A family with rope_parameters for each kind of layer; those of windows are not scaled."""

    def read(self, source: ConfigJson) -> GPTConfig:
        kinds = source.get("rope_parameters") or self.rope
        if not isinstance(kinds, dict) or not kinds.keys() <= {FULL, WINDOWED}:
            shown = json.dumps(kinds)[:80]
            raise source.error(f"rope_parameters={shown} must have {FULL} and {WINDOWED}")
        # As transformers fills them in
        full = {"rope_theta": source.get("rope_theta", self.thetas[0]), **(kinds.get(FULL) or {})}
        full |= source.get("rope_scaling") or {}
        base = source.get("rope_local_base_freq", self.thetas[1])
        windowed = {"rope_theta": base, **(kinds.get(WINDOWED) or {})}
        config = super().read(source.with_keys(rope_parameters=full, rope_scaling=None))
        if config.window is not None:
            only = source.with_keys(rope_parameters=windowed, rope_scaling=None)
            theta, scaling = only.rope()
            if not scaling:
                config.window_rope_theta = theta
            elif (theta, scaling) != (config.rope_theta, config.rope_scaling):
                shown = f"rope_parameters.{WINDOWED}={json.dumps(windowed)[:80]}"
                raise source.error(f"{shown} is not covered yet; only the base may be its own")
        return config

    def write_rope(self, config: GPTConfig) -> dict[str, Any]:
        keys = super().write_rope(config)
        full = windowed = keys["rope_parameters"]
        if config.window_rope_theta is not None:
            windowed = {"rope_type": "default", "rope_theta": config.window_rope_theta}
        return keys | {"rope_parameters": {FULL: full, WINDOWED: windowed}}
