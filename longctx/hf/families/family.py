"""What a model family is: one `model_type` of transformers, and the GPTConfig that it stands for.

A family is one file in this folder. It subclasses `Family`, says what is its own, and registers
itself; reading, checking, loading and writing of folders ask the registry and name no family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from longctx.config.fields import keys
from longctx.config.rope_config import check_scaling
from longctx.hf.families.config_json import ConfigJson
from longctx.spec.block import BlockSpec
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import Piece

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
FULL, WINDOWED = "full_attention", "sliding_attention"  # kinds of layers
# What every family reads and writes: key of config.json → key of GPTConfig
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "channels",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "max_position_embeddings": "context",
}
FLAGS = {"tie_word_embeddings": ("tied",)}
# Numbers above 0: key of config.json → key of GPTConfig, and the value of a missing one
NUMBERS = {"rms_norm_eps": ("norm_eps", 1e-6), "initializer_range": ("init_std", 0.02)}
# Other keys of GPTConfig that every family can express
COMMON = ("head_dim", "rope_theta", "rope_scaling")


class Family:
    """One `model_type` of transformers; the methods hold for a model like Llama."""

    model_type: ClassVar[str]
    # its class in transformers is <class_name>ForCausalLM
    class_name: ClassVar[str]
    # of the families that suit a GPTConfig, the one with the highest rank writes it
    rank: ClassVar[int]
    # values of transformers for keys that config.json lacks
    defaults: ClassVar[dict[str, Any]] = {}
    # rope_parameters of transformers, if config.json has none
    rope: ClassVar[dict[str, Any]] = {}
    # keys of GPTConfig that have one value in all models of this family
    fixed: ClassVar[dict[str, Any]] = {}
    # without layer_types every n-th layer has no window: n, or its key of config.json
    full_every: ClassVar[int | str | None] = None
    # key of config.json, true or false → keys of GPTConfig that all have its value
    flags: ClassVar[dict[str, tuple[str, ...]]] = {}
    # whole numbers: key of config.json → key of GPTConfig
    sizes: ClassVar[dict[str, str]] = {}
    # as NUMBERS; None: a missing one is none
    numbers: ClassVar[dict[str, tuple[str, Any]]] = {}
    # another name that transformers reads too → key of config.json, a whole number
    aliases: ClassVar[dict[str, str]] = {}
    # other keys of config.json that it reads
    keys: ClassVar[tuple[str, ...]] = ()
    # keys of config.json → the values that they may have, as COVERED
    covered: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # keys of config.json that its class in transformers ignores
    harmless: ClassVar[tuple[str, ...]] = ()
    # False: its class in transformers knows head_dim only if it is given
    states_head_dim: ClassVar[bool] = True
    # words of our tensors' names → this family's, replaced in this order; tensors of one name are
    # joined by rows
    names: ClassVar[dict[str, str]] = {}
    # other keys of GPTConfig that it can express, beside COMMON; the rest must have their defaults
    features: ClassVar[tuple[str, ...]] = ()

    def suits(self, config: GPTConfig) -> bool:
        """Return True if `config` has this family's fixed values, and experts if the family has."""
        has_experts = "experts.count" not in self.sizes.values() or config.experts.count is not None
        fixed = self.fixed.items()
        return has_experts and all(attrgetter(key)(config) == value for key, value in fixed)

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        """Return the keys of GPTConfig in `features` but for windows, as config.json says them."""
        return {}

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        """Return the keys of config.json that this family has and others may not have."""
        return {}

    def check_features(self, config: GPTConfig) -> None:
        """Raise ValueError for values of `features` that do not go together in this family."""

    def default_windowed(self, source: ConfigJson, layers: int) -> Sequence[int]:
        """Return the layers with a window if config.json has no layer_types."""
        every = self.full_every
        every = source.size(every) if isinstance(every, str) else every
        return range(layers) if every is None else [n for n in range(layers) if (n + 1) % every]

    def check_tokenizer(self, file: Path) -> None:
        """Raise ValueError for a tokenizer.json that transformers would not use for this family."""

    def leaves_out(self, tensor: str, config: GPTConfig) -> bool:
        """Return True for a tensor of its folders that is not of `config`, and changes nothing."""
        return False

    def tensors(self, config: GPTConfig) -> Iterator[Piece]:
        """Yield every tensor of its weights, as rows of a parameter of GPT."""
        embedding = config.vocab_size or 0, config.channels
        yield Piece(EMBEDDING, "embed.weight", 0, embedding)
        for n, block in enumerate(config.blocks()):
            yield from self.renamed(block, n)
        yield Piece("model.norm.weight", "norm.weight", 0, (config.channels,))
        if not config.tied:
            yield Piece(LM_HEAD, "head.weight", 0, embedding)

    def renamed(self, block: BlockSpec, n: int) -> Iterator[Piece]:
        """Yield the tensors of layer `n` by the `names` of this family."""
        joined: dict[str, Piece] = {}
        for part in block.parts():
            for piece in part.pieces(f"model.layers.{n}", f"blocks.{n}"):
                theirs = f"{piece.theirs}."
                for ours, own in self.names.items():
                    theirs = theirs.replace(f".{ours}.", f".{own}.")
                theirs = theirs.removesuffix(".")
                piece = piece._replace(theirs=theirs)
                if before := joined.get(theirs):
                    rows = before.shape[0] + piece.shape[0]
                    piece = before._replace(shape=(rows, *piece.shape[1:]))
                joined[theirs] = piece
        yield from joined.values()

    def read(self, source: ConfigJson) -> GPTConfig:
        """Return the model of a config.json; ValueError names the first key that GPT lacks."""
        if self.rope and not (source.get("rope_parameters") or source.get("rope_scaling")):
            source = source.with_keys(rope_parameters=self.rope)
        source = source.with_defaults(self.defaults)
        for other, key in self.aliases.items():
            if source.get(other) is not None:
                source = source.with_keys(**{key: source.size(other)})
        source.refuse_uncovered(self.read_keys(), self.harmless, self.covered)
        # Files from before grouped queries: every head has keys of its own
        if source.get("num_key_value_heads") is None:
            source = source.with_keys(num_key_value_heads=source.size("num_attention_heads"))
        layers, (theta, scaling) = source.size("num_hidden_layers"), source.rope()
        values: dict[str, Any] = {
            **self.fixed,
            **{ours: source.size(key) for key, ours in (SIZES | self.sizes).items()},
            **{
                ours: source.number(key, missing)
                for key, (ours, missing) in (NUMBERS | self.numbers).items()
            },
            "rope_theta": theta,
            "rotary_share": source.rotary_share("rotary_share" in self.features),
        }
        for key, names in (FLAGS | self.flags).items():
            values |= dict.fromkeys(names, source.flag(key))
        # channels / heads is what null means, so an equal model has an equal config
        if source.get("head_dim") is not None:
            size = source.size("head_dim")
            is_usual = size * values["heads"] == values["channels"]
            values["head_dim"] = None if is_usual else size
        if windowed := self.read_windowed(source, layers):
            values["window"] = source.size("sliding_window")
            values["window_layers"] = None if len(windowed) == layers else windowed

        # Keys such as experts.count are those of a group
        config = GPTConfig()
        for name, value in (values | self.read_features(source, layers)).items():
            group, _, key = name.rpartition(".")
            setattr(attrgetter(group)(config) if group else config, key, value)
        # Checked apart, since its errors name the key of the file
        path = f"{source.file}: {source.rope_key}"
        check_scaling(path, scaling, config.rotary_size, config.context)
        config.rope_scaling = scaling
        try:
            config.validate()
        except ValueError as error:
            raise source.error(str(error)) from error
        return config

    def read_keys(self) -> set[str]:
        """Return the keys of config.json that this family reads and not all do."""
        window = {"sliding_window"} if "window" in self.features else set()
        every = {self.full_every} if isinstance(self.full_every, str) else set()
        own = *self.keys, *self.flags, *self.sizes, *self.numbers, *self.aliases
        return {*own} | window | every

    def read_windowed(self, source: ConfigJson, layers: int) -> list[int]:
        """Return the layers that have a window."""
        used = "use_sliding_window" not in self.keys or source.flag("use_sliding_window")
        used = used and "window" in self.features and source.get("sliding_window") is not None
        kinds = source.layer_types(layers, sliding=used)
        if used and kinds is None:
            return list(self.default_windowed(source, layers))
        return [n for n, kind in enumerate(kinds or ()) if kind == WINDOWED]

    def check(self, config: GPTConfig) -> None:
        """Raise ValueError naming the first key of `config` that this family cannot express."""
        default = GPTConfig()
        free = {*COMMON, *self.features, *SIZES.values(), *self.sizes.values()}
        free |= {ours for ours, _ in (NUMBERS | self.numbers).values()}
        for names in (FLAGS | self.flags).values():
            free |= {*names}
            for name in names:
                if attrgetter(name)(config) != attrgetter(names[0])(config):
                    raise self.cannot(config, name)
        for name, declared in keys(GPTConfig).items():
            if name not in free and not declared.is_group:
                wanted = self.fixed.get(name, attrgetter(name)(default))
                if attrgetter(name)(config) != wanted:
                    raise self.cannot(config, name)
        self.check_features(config)

    def cannot(self, config: GPTConfig, key: str) -> ValueError:
        """Return the error for a key of `config` that this family cannot express."""
        value = attrgetter(key)(config)
        shown = str(value).lower() if isinstance(value, bool) else value
        return ValueError(
            f"model.{key}={shown}: no class of transformers has it beside the model's other keys "
            f"({self.model_type})"
        )

    def write(self, config: GPTConfig, context: int) -> dict[str, Any]:
        """Return config.json of `config` for `context` tokens; ValueError if it cannot say that."""
        self.check(config)
        if config.rope_scaling.get("rope_type") == "dynamic":
            # The length from which its base starts to grow, whatever the run trained at
            context = config.context or context
        # Experts without a width of their own have that of the dense layers
        config = replace(config, experts=replace(config.experts, ffn=config.expert_ffn))
        # The first entry of a key in the tables is its key of GPTConfig
        tables = FLAGS | self.flags | NUMBERS | self.numbers
        own = SIZES | self.sizes | {key: names[0] for key, names in tables.items()}
        values = {key: attrgetter(ours)(config) for key, ours in own.items()}
        if self.states_head_dim or config.head_dim is not None:
            values["head_dim"] = config.head_size
        if "use_sliding_window" in self.keys:
            values["use_sliding_window"] = config.window is not None
        if "window" in self.features:
            values["sliding_window"] = config.window
        if "window_layers" in self.features:
            windowed = windowed_layers(config)
            values["layer_types"] = [
                WINDOWED if n in windowed else FULL for n in range(config.layers)
            ]
        return {
            "architectures": [f"{self.class_name}ForCausalLM"],
            "model_type": self.model_type,
            **values,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "attention_dropout": 0.0,
            "use_cache": True,
            **write_rope(config),
            **self.write_features(config),
        }


FAMILIES: dict[str, Family] = {}


def register(family: type[Family]) -> type[Family]:
    """Make a family known by its model_type."""
    assert family.model_type not in FAMILIES
    FAMILIES[family.model_type] = family()
    return family


def write_rope(config: GPTConfig) -> dict[str, Any]:
    """Return RoPE as transformers 5 names it (rope_parameters), and as tools of older ones do."""
    base: dict[str, Any] = {"rope_theta": config.rope_theta}
    if config.rotary_share != 1:
        base["partial_rotary_factor"] = config.rotary_share
    scaling = dict(config.rope_scaling) or {"rope_type": "default"}
    older = {"rope_scaling": scaling} if config.rope_scaling else {}
    return {"rope_parameters": scaling | base, **base, **older}


def windowed_layers(config: GPTConfig) -> list[int]:
    """Return the layers of `config` that have a window."""
    return [n for n in range(config.layers) if config.window_of(n) is not None]


class TwoRopes(Family):
    """A family with rope_parameters for each kind of layer; those of windows are not scaled."""

    # base of the rotary frequencies in full layers, and in those with a window
    thetas: ClassVar[tuple[float, float]]

    def read(self, source: ConfigJson) -> GPTConfig:
        kinds = source.get("rope_parameters") or {}
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

    def write(self, config: GPTConfig, context: int) -> dict[str, Any]:
        keys = super().write(config, context)
        full = windowed = keys["rope_parameters"]
        if config.window_rope_theta is not None:
            windowed = {"rope_type": "default", "rope_theta": config.window_rope_theta}
        return keys | {"rope_parameters": {FULL: full, WINDOWED: windowed}}
