"""Weights of Hugging Face folders in, trained models out as such folders. Nothing in a folder is
run: JSON and safetensors only.

GPT computes what transformers' Llama, Mistral, SmolLM3, Qwen2 and Qwen3 compute, their sliding
windows, layers without rotation and RoPE scalings included. Every key of config.json that would
change that computation is read or checked, and what is not covered is refused by key and value. A
tensor there is a block of rows of a parameter here: q, k, v are the rows of one projection, gate
and up those of another (see `layers.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from longctx.config.model_config import AttentionConfig, GPTConfig
from longctx.config.rope_config import ORIGINAL, check_scaling
from longctx.model.gpt import GPT

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SIZES = {
    "layers": "num_hidden_layers",
    "channels": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
}
# What transformers takes where config.json lacks a key (null kv_heads: as many as heads).
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    "smollm3": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
}
HAS_LAYER_TYPES = ("qwen2", "qwen3", "smollm3")
# Keys that change the computation, with the values under which it is GPT's; a missing key has the
# first of them.
COVERED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "is_causal": (True, None),
    "quantization_config": (None,),
}
IGNORED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)  # computed, not learned; in old Llama files


class Piece(NamedTuple):
    """A tensor of a Hugging Face model: rows `first` and on of the parameter `ours`."""

    theirs: str
    ours: str
    first: int
    shape: tuple[int, ...]


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def is_folder(path: Path) -> bool:
    """Whether `path` is meant as a Hugging Face folder: it has a config.json, and is no run and no
    adapter.
    """
    adapter = (path / "adapter_config.json").exists() and not any(path.glob("model*.safetensors"))
    return (path / "config.json").is_file() and not (path / "config.yaml").exists() and not adapter


def read_config(folder: str | Path) -> GPTConfig:
    """The model of `folder`/config.json, as transformers 5 writes it (rope_parameters) or older
    ones (rope_theta).

    Raises ValueError or FileNotFoundError naming the first key and value of a model that GPT does
    not cover.
    """
    file = Path(folder) / "config.json"
    theirs = read_json(file)
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise ValueError(
            f"{file}: model_type={kind} is not covered yet; there are {', '.join(DEFAULTS)}"
        )
    theirs = DEFAULTS[kind] | theirs
    _check_covered(file, theirs)
    sizes: dict[str, Any] = {ours: _size(file, theirs, key) for ours, key in SIZES.items()}
    shared = theirs.get("num_key_value_heads")
    head_dim = theirs.get("head_dim")
    head_dim = None if head_dim is None else _size(file, theirs, "head_dim")
    if head_dim is not None and head_dim * sizes["heads"] == sizes["channels"]:
        head_dim = None
    biased = kind in ("llama", "qwen3", "smollm3") and _flag(file, theirs, "attention_bias")
    theta, scaling = _rope(file, theirs)
    context = _size(file, theirs, "max_position_embeddings")
    config = GPTConfig(
        **sizes,
        **_window(file, kind, theirs, sizes["layers"]),
        kv_heads=sizes["heads"] if shared is None else _size(file, theirs, "num_key_value_heads"),
        head_dim=head_dim,
        rope_theta=theta,
        nope_layers=_nope_layers(file, theirs, sizes["layers"]) if kind == "smollm3" else [],
        norm_eps=_number(file, theirs, "rms_norm_eps", 1e-6),
        tied=_flag(file, theirs, "tie_word_embeddings"),
        qkv_bias=biased or kind == "qwen2",  # there q, k and v always have biases, the output never
        out_bias=biased,
        mlp_bias=kind in ("llama", "smollm3") and _flag(file, theirs, "mlp_bias"),
        qk_norm=kind == "qwen3",
        init_std=_number(file, theirs, "initializer_range", 0.02),
        context=context,
    )
    check_scaling(f"{file}: {_rope_place(theirs)}", scaling, config.head_size, context)
    config.rope_scaling = scaling
    try:
        config.validate()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return config


def pretrained(
    folder: str | Path,
    attention: AttentionConfig | str = "flash",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> GPT:
    """The model in `folder`, on `device`, in `dtype` or that of its files; in host memory it exists
    once at most.

    Raises ValueError or OSError, one line, for whatever is not covered, missing or broken.
    """
    config = read_config(folder)
    stored = check_weights(config, folder)
    with torch.device("meta"):
        model = GPT(config, attention)
    model = model.to(dtype or DTYPES[stored["model.embed_tokens.weight"].dtype]).to_empty(
        device=device
    )
    load_weights(model, folder)
    return model


@torch.no_grad()
def load_weights(model: GPT, folder: str | Path) -> None:
    """Copy the weights of `folder` into `model`, tensor by tensor, cast to its dtype; raises as
    `check_weights`.

    Rows of a larger vocabulary than the folder's keep what they hold.
    """
    stored = check_weights(model.config, folder)
    parameters = dict(model.named_parameters())
    for piece in pieces(read_config(folder)):
        # opened for each tensor: the pages of a file count as ours for as long as it is mapped
        with safe_open(stored[piece.theirs].file, framework="pt") as file:
            tensor = file.get_tensor(piece.theirs)
            parameters[piece.ours][piece.first : piece.first + len(tensor)].copy_(tensor)
            del tensor


def check_weights(config: GPTConfig, folder: str | Path) -> dict[str, Stored]:
    """Where each tensor of `folder` lies, after checking, from the headers alone, that they make
    the model of `config`.

    Raises ValueError, one line, for a missing, unexpected or mis-shaped tensor, another
    architecture than `config`, or a file that is not safetensors.
    """
    folder = Path(folder)
    source = read_config(folder)
    free = {  # what the folder does not decide; positions may be stretched, see extension.py
        key: getattr(config, key)
        for key in ("vocab_size", "init_std", "context", "head_dim", "rope_theta", "rope_scaling")
    }
    if replace(source, **free) != config or source.head_size != config.head_size:
        raise ValueError(
            f"{folder}: its config.json describes another model than the one that is to be filled"
        )
    if (config.vocab_size or 0) < (source.vocab_size or 0):
        raise ValueError(
            f"model.vocab_size={config.vocab_size}: {folder} has weights for {source.vocab_size:,} tokens; "
            "use at least that, or null"
        )
    stored = inventory(folder)
    unused = {name for name in stored if not IGNORED.fullmatch(name)}
    for piece in pieces(source):
        found = stored.get(piece.theirs)
        if found is None:
            raise ValueError(f"{folder}: no tensor {piece.theirs}, which its config.json asks for")
        if found.shape != piece.shape:
            raise ValueError(
                f"{found.file}: {piece.theirs} is {list(found.shape)}, by config.json it is {list(piece.shape)}"
            )
        if found.dtype not in DTYPES:
            raise ValueError(
                f"{found.file}: {piece.theirs} is {found.dtype}; covered are {', '.join(DTYPES)}"
            )
        unused.discard(piece.theirs)
    if source.tied and "lm_head.weight" in unused:
        unused.discard("lm_head.weight")
        _check_same(stored, "lm_head.weight", "model.embed_tokens.weight")
    if unused:
        name = min(unused)
        raise ValueError(
            f"{stored[name].file}: tensor {name} has no place in the model that config.json describes"
        )
    return stored


def pieces(config: GPTConfig) -> Iterator[Piece]:
    """Every tensor of the Hugging Face model of `config`, and its rows here."""
    V, C, F, D = config.vocab_size or 0, config.channels, config.ffn, config.head_size
    q, kv = config.heads * D, config.kv_heads * D
    qkv = (("q", 0, q), ("k", q, kv), ("v", q + kv, kv))
    mlp = (
        ("gate", "gate_up", 0, (F, C)),
        ("up", "gate_up", F, (F, C)),
        ("down", "down", 0, (C, F)),
    )
    yield Piece("model.embed_tokens.weight", "embed.weight", 0, (V, C))
    for n in range(config.layers):
        there, here = f"model.layers.{n}.", f"blocks.{n}."
        yield Piece(f"{there}input_layernorm.weight", f"{here}attention_norm.weight", 0, (C,))
        for x, first, rows in qkv:
            yield Piece(
                f"{there}self_attn.{x}_proj.weight", f"{here}attention.qkv.weight", first, (rows, C)
            )
            if config.qkv_bias:
                yield Piece(
                    f"{there}self_attn.{x}_proj.bias", f"{here}attention.qkv.bias", first, (rows,)
                )
            if config.qk_norm and x != "v":
                yield Piece(
                    f"{there}self_attn.{x}_norm.weight", f"{here}attention.{x}_norm.weight", 0, (D,)
                )
        yield Piece(f"{there}self_attn.o_proj.weight", f"{here}attention.out.weight", 0, (C, q))
        if config.out_bias:
            yield Piece(f"{there}self_attn.o_proj.bias", f"{here}attention.out.bias", 0, (C,))
        yield Piece(f"{there}post_attention_layernorm.weight", f"{here}mlp_norm.weight", 0, (C,))
        for x, mine, first, shape in mlp:
            yield Piece(f"{there}mlp.{x}_proj.weight", f"{here}mlp.{mine}.weight", first, shape)
            if config.mlp_bias:
                yield Piece(f"{there}mlp.{x}_proj.bias", f"{here}mlp.{mine}.bias", first, shape[:1])
    yield Piece("model.norm.weight", "norm.weight", 0, (C,))
    if not config.tied:
        yield Piece("lm_head.weight", "head.weight", 0, (V, C))


def inventory(folder: Path) -> dict[str, Stored]:
    """Every tensor in the safetensors of `folder`, one file or the shards that an index names, from
    their headers.
    """
    index = folder / "model.safetensors.index.json"
    placed: Any = {}
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif index.is_file():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise ValueError(f"{index}: no weight_map that says which tensor lies in which file")
        for name in placed.values():
            if not isinstance(name, str) or not re.fullmatch(
                r"[A-Za-z0-9][\w.-]*\.safetensors", name
            ):
                raise ValueError(
                    f"{index}: {name!r} is not the name of a safetensors file beside it"
                )
        files = sorted(set(placed.values()))
    else:
        pickled = next(iter(sorted(folder.glob("*.bin"))), None)
        also = (
            f" ({pickled.name} is not read: a pickle can run code; save the model as safetensors)"
            if pickled
            else ""
        )
        raise FileNotFoundError(
            f"{folder}: no model.safetensors and no model.safetensors.index.json{also}"
        )
    stored: dict[str, Stored] = {}
    for name in files:
        for tensor, found in _header(folder / name).items():
            if tensor in stored or placed.get(tensor, name) != name:
                raise ValueError(
                    f"{found.file}: {tensor} is in more than one file, or not where the index says"
                )
            stored[tensor] = found
    absent = sorted(placed.keys() - stored.keys())
    if absent:
        raise ValueError(
            f"{folder / placed[absent[0]]}: no tensor {absent[0]}, which {index.name} places there"
        )
    return stored


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; ValueError or FileNotFoundError, one line, where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file}: no such file; give a folder with config.json and safetensors"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: not a JSON object")
    return content


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()  # not a dictionary
            slices = {name: opened.get_slice(name) for name in names}
            return {
                name: Stored(file, tuple(x.get_shape()), x.get_dtype())
                for name, x in slices.items()
            }
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: no such file, but the index names it") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def _check_same(stored: dict[str, Stored], name: str, other: str) -> None:
    if stored[name][1:] == stored[other][1:]:
        with (
            safe_open(stored[name].file, framework="pt") as a,
            safe_open(stored[other].file, framework="pt") as b,
        ):
            if torch.equal(a.get_tensor(name), b.get_tensor(other)):
                return
    raise ValueError(
        f"{stored[name].file}: {name} differs from {other}, but tie_word_embeddings=true"
    )


def _check_covered(file: Path, theirs: dict[str, Any]) -> None:
    for key, values in COVERED.items():
        _refuse_unless(file, key, theirs.get(key, values[0]), values)


def _window(file: Path, kind: str, theirs: dict[str, Any], layers: int) -> dict[str, Any]:
    """`window` and `window_layers` of a model: Mistral has one for all layers, others name the
    layers, Llama has none.
    """
    used = kind == "mistral" or (
        kind in HAS_LAYER_TYPES and _flag(file, theirs, "use_sliding_window")
    )
    default = 4096 if kind.startswith("qwen") else None
    size = theirs.get("sliding_window", default) if used else None
    window = None if size is None else _size(file, {"sliding_window": size}, "sliding_window")
    kinds = theirs.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise ValueError(
            f"{file}: layer_types={json.dumps(kinds)[:80]} must be a list of {layers}, one for each layer"
        )
    for n, found in enumerate(kinds or []):
        sliding = ("sliding_attention",) if window is not None else ()
        _refuse_unless(file, f"layer_types[{n}]", found, ("full_attention", *sliding))
    if window is None or kind == "mistral":
        return {"window": window}
    if kinds is None and kind == "smollm3":
        chosen = _nope_layers(file, theirs, layers)
    elif kinds is None:
        first = theirs.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool):
            raise ValueError(f"{file}: max_window_layers={first!r} must be a whole number")
        chosen = list(range(max(0, first), layers))
    else:
        chosen = [n for n, found in enumerate(kinds) if found == "sliding_attention"]
    if not chosen:
        return {"window": None}
    return {"window": window, "window_layers": None if len(chosen) == layers else chosen}


def _nope_layers(file: Path, theirs: dict[str, Any], layers: int) -> list[int]:
    """The layers of SmolLM3 without rotation: those with 0 in no_rope_layers, by default every
    fourth.
    """
    flags = theirs.get("no_rope_layers")
    if flags is None:
        every = _size(file, {"no_rope_layer_interval": 4} | theirs, "no_rope_layer_interval")
        return list(range(every - 1, layers, every))
    if (
        not isinstance(flags, list)
        or len(flags) < layers
        or any(flag not in (0, 1) for flag in flags)
    ):
        raise ValueError(
            f"{file}: no_rope_layers={json.dumps(flags)[:80]} must be a list of {layers} times 0 or 1"
        )
    return [n for n in range(layers) if not flags[n]]


def _rope_place(theirs: dict[str, Any]) -> str:
    """The key under which RoPE's parameters lie: the older form comes first, as in transformers."""
    return "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"


def _rope(file: Path, theirs: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """The base of the rotary frequencies and their scaling, {} for none, with transformers'
    defaults filled in.
    """
    place = _rope_place(theirs)
    rope = theirs.get(place) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{file}: {place}={rope!r} must be an object")
    for key, value in rope.items():
        if isinstance(value, dict):
            raise ValueError(
                f"{file}: {place}.{key}={json.dumps(value)[:80]} is not covered yet; one rope for all layers"
            )
    _refuse_unless(
        file, f"{place}.partial_rotary_factor", rope.get("partial_rotary_factor"), (1.0, None)
    )
    theta = _number(file, rope if "rope_theta" in rope else theirs, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str):
        raise ValueError(f"{file}: {place}.rope_type={kind!r} must be a word")
    if kind == "default":
        return theta, {}
    scaling = {
        key: value
        for key, value in rope.items()
        if key not in ("type", "rope_theta", "partial_rotary_factor")
    }
    scaling = {"rope_type": kind} | {
        key: value for key, value in scaling.items() if value is not None
    }
    if kind in ("llama3", "yarn", "longrope"):
        outer = theirs.get(ORIGINAL)
        if outer is not None and outer != scaling.get(ORIGINAL, outer):
            raise ValueError(
                f"{file}: {ORIGINAL}={outer} differs from {place}.{ORIGINAL}={scaling[ORIGINAL]}"
            )
        scaling.setdefault(ORIGINAL, theirs["max_position_embeddings"] if outer is None else outer)
    return theta, scaling


def _refuse_unless(file: Path, key: str, value: Any, covered: tuple[Any, ...]) -> None:
    if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in covered):
        shown = json.dumps(value)[:80] if not isinstance(value, str) else value[:80]
        wanted = covered[0] if isinstance(covered[0], str) else json.dumps(covered[0])
        raise ValueError(f"{file}: {key}={shown} is not covered yet; only {wanted} is")


def _size(file: Path, theirs: dict[str, Any], key: str) -> int:
    value = theirs.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"{file}: {key}={value!r} must be a whole number from 1 up")
    return value


def _number(file: Path, theirs: dict[str, Any], key: str, default: float) -> float:
    value = theirs.get(key)
    value = default if value is None else value
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value < float("inf")
    ):
        raise ValueError(f"{file}: {key}={value!r} must be a number above 0")
    return float(value)


def _flag(file: Path, theirs: dict[str, Any], key: str) -> bool:
    value = theirs.get(key)
    value = False if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"{file}: {key}={value!r} must be true or false")
    return value
