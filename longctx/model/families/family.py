"""What a model family is: one `model_type` of transformers, and the GPTConfig that it stands for.

A family is one file in this folder. It subclasses `Family`, says what is its own, and registers
itself; reading, checking, loading and writing of folders ask the registry and name no family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from longctx.config.block import Block
from longctx.config.fields import keys
from longctx.config.model_config import GPTConfig
from longctx.config.parts import Piece
from longctx.config.rope_config import check_scaling
from longctx.model.families.config_json import ConfigJson

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
FULL, WINDOWED = "full_attention", "sliding_attention"  # kinds of layers
# Keys of GPTConfig that every family can express, whatever their values.
COMMON = (
    *("vocab_size", "layers", "channels", "heads", "kv_heads", "head_dim", "ffn"),
    *("rope_theta", "rope_scaling", "norm_eps", "tied", "context", "init_std"),
)


class Family:
    """One `model_type` of transformers; the methods hold for a model like Llama."""

    model_type: ClassVar[str]
    # its class in transformers is <class_name>ForCausalLM
    class_name: ClassVar[str]
    # of the families that suit a GPTConfig, the one with the highest rank writes it
    rank: ClassVar[int]
    # what transformers takes where config.json lacks a key
    defaults: ClassVar[dict[str, Any]] = {}
    # keys of config.json that it reads, beside those that all families have
    keys: ClassVar[tuple[str, ...]] = ()
    # keys of config.json that its class in transformers ignores
    harmless: ClassVar[tuple[str, ...]] = ()
    # word in our names of tensors → this family's; tensors of one name are joined by rows
    names: ClassVar[dict[str, str]] = {}
    # keys of GPTConfig that it can express, beside COMMON; all others must have their defaults
    features: ClassVar[tuple[str, ...]] = ()

    def suits(self, config: GPTConfig) -> bool:
        """Whether `config` has what sets this family apart, so that it should write it."""
        raise NotImplementedError

    def read_features(self, source: ConfigJson, layers: int) -> dict[str, Any]:
        """The keys of GPTConfig in `features`, as config.json says them."""
        raise NotImplementedError

    def write_features(self, config: GPTConfig) -> dict[str, Any]:
        """The keys of config.json that this family has and others may not have."""
        raise NotImplementedError

    def check_features(self, config: GPTConfig) -> None:
        """Raise ValueError for values of `features` that do not go together in this family."""

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

    def renamed(self, block: Block, n: int) -> Iterator[Piece]:
        """Yield the tensors of layer `n` by the `names` of this family."""
        joined: dict[str, Piece] = {}
        for part in block.parts():
            for piece in part.pieces(f"model.layers.{n}", f"blocks.{n}"):
                words = piece.theirs.split(".")
                theirs = ".".join(self.names.get(word, word) for word in words)
                piece = piece._replace(theirs=theirs)
                if before := joined.get(theirs):
                    rows = before.shape[0] + piece.shape[0]
                    piece = before._replace(shape=(rows, *piece.shape[1:]))
                joined[theirs] = piece
        yield from joined.values()

    def read(self, source: ConfigJson) -> GPTConfig:
        """The model of a config.json; ValueError naming the first key that GPT does not cover."""
        source = source.with_defaults(self.defaults)
        source.refuse_uncovered(self.keys, self.harmless)
        layers, heads = source.size("num_hidden_layers"), source.size("num_attention_heads")
        channels, head_dim = source.size("hidden_size"), None
        if source.get("head_dim") is not None and source.size("head_dim") * heads != channels:
            head_dim = source.size("head_dim")
        shared = source.get("num_key_value_heads") is not None
        theta, scaling = source.rope()
        config = GPTConfig(
            vocab_size=source.size("vocab_size"),
            layers=layers,
            channels=channels,
            heads=heads,
            kv_heads=source.size("num_key_value_heads") if shared else heads,
            head_dim=head_dim,
            ffn=source.size("intermediate_size"),
            rotary_share=source.rotary_share("rotary_share" in self.features),
            norm_eps=source.number("rms_norm_eps", 1e-6),
            tied=source.flag("tie_word_embeddings"),
            init_std=source.number("initializer_range", 0.02),
            context=source.size("max_position_embeddings"),
            **{"rope_theta": theta, **self.read_features(source, layers)},
        )
        place = f"{source.file}: {source.rope_key}"
        check_scaling(place, scaling, config.rotary_size, config.context)
        config.rope_scaling = scaling
        try:
            config.validate()
        except ValueError as error:
            raise source.error(str(error)) from error
        return config

    def check(self, config: GPTConfig) -> None:
        """Raise ValueError naming the first key of `config` that this family cannot express."""
        default = GPTConfig()
        for name, declared in keys(GPTConfig).items():
            if name in COMMON or name in self.features or declared.is_group:
                continue
            if attrgetter(name)(config) != attrgetter(name)(default):
                raise self.cannot(config, name)
        self.check_features(config)

    def cannot(self, config: GPTConfig, key: str) -> ValueError:
        """The error for a key of `config` that this family cannot express."""
        value = attrgetter(key)(config)
        shown = str(value).lower() if isinstance(value, bool) else value
        return ValueError(
            f"model.{key}={shown}: no class of transformers has it beside the model's other keys "
            f"({self.model_type})"
        )

    def write(self, config: GPTConfig, context: int) -> dict[str, Any]:
        """config.json of `config` for `context` tokens; ValueError where it cannot say that."""
        self.check(config)
        if config.rope_scaling.get("rope_type") == "dynamic":
            context = config.context or context  # from which its base starts to grow
        return {
            "architectures": [f"{self.class_name}ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.channels,
            "intermediate_size": config.ffn,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "initializer_range": config.init_std,
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tied,
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
    """RoPE as transformers 5 names it (rope_parameters), and as tools that follow older ones do."""
    base: dict[str, Any] = {"rope_theta": config.rope_theta}
    if config.rotary_share != 1:
        base["partial_rotary_factor"] = config.rotary_share
    scaling = dict(config.rope_scaling) or {"rope_type": "default"}
    older = {"rope_scaling": scaling} if config.rope_scaling else {}
    return {"rope_parameters": scaling | base, **base, **older}


def read_windows(
    source: ConfigJson, layers: int, used: bool, otherwise: Callable[[], Sequence[int]]
) -> dict[str, Any]:
    """`window` and `window_layers` of GPTConfig; a model without windows is not `used` to them.

    The windowed layers stand in layer_types. Where that is missing, `otherwise` gives them.
    """
    sized = used and source.get("sliding_window") is not None
    window = source.size("sliding_window") if sized else None
    kinds = source.layer_types(layers, sliding=window is not None)
    if window is None:
        return {"window": None}
    if kinds is None:
        sliding = list(otherwise())
    else:
        sliding = [n for n, kind in enumerate(kinds) if kind == "sliding_attention"]
    if not sliding:
        return {"window": None}
    return {"window": window, "window_layers": None if len(sliding) == layers else sliding}


def windowed_layers(config: GPTConfig) -> list[int]:
    """The layers of `config` that have a window."""
    return [n for n in range(config.layers) if config.window_of(n) is not None]


def write_windows(config: GPTConfig) -> dict[str, Any]:
    """The windows of `config` in config.json, layer by layer."""
    sliding = windowed_layers(config)
    return {
        "sliding_window": config.window,
        "layer_types": [
            "sliding_attention" if n in sliding else "full_attention" for n in range(config.layers)
        ],
    }


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
        plain = {"rope_parameters": full, "rope_scaling": None}
        config = super().read(ConfigJson(source.file, source.keys | plain))
        if config.window is not None:
            plain["rope_parameters"] = windowed
            theta, scaling = ConfigJson(source.file, source.keys | plain).rope()
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
