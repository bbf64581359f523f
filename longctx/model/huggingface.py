"""Weights of Hugging Face folders in, trained models out as such folders. Nothing in a folder is run: JSON and safetensors only.

GPT computes what transformers' Llama, Mistral (without a window), Qwen2 and Qwen3 compute. Every key of config.json that
would change that computation is checked, and what is not covered is refused by key and value. A tensor there is a block
of rows of a parameter here: q, k, v are the rows of one projection, gate and up those of another (see `layers.py`).
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

from longctx.attention.config import AttentionConfig
from longctx.model.config import GPTConfig
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
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}
# Keys that change the computation, with the values under which it is GPT's; a missing key has the first of them.
COVERED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
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
    """Whether `path` is meant as a Hugging Face folder: it has a config.json, and is no run."""
    return (path / "config.json").is_file() and not (path / "config.yaml").exists()


def read_config(folder: str | Path) -> GPTConfig:
    """The model of `folder`/config.json, as transformers 5 writes it (rope_parameters) or older ones (rope_theta).

    Raises ValueError or FileNotFoundError naming the first key and value of a model that GPT does not cover.
    """
    file = Path(folder) / "config.json"
    theirs = read_json(file)
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise ValueError(f"{file}: model_type={kind} is not covered yet; there are {', '.join(DEFAULTS)}")
    theirs = DEFAULTS[kind] | theirs
    if kind.startswith("qwen") and not theirs.get("use_sliding_window"):
        theirs["sliding_window"] = None  # as transformers does; many of their configs name a window that is not used
    if kind == "qwen2":
        theirs["attention_bias"] = False  # not read there: q, k and v always have biases, the output never
    _check_covered(file, theirs)
    sizes: dict[str, Any] = {ours: _size(file, theirs, key) for ours, key in SIZES.items()}
    shared = theirs.get("num_key_value_heads")
    head_dim = theirs.get("head_dim")
    head_dim = None if head_dim is None else _size(file, theirs, "head_dim")
    if head_dim is not None and head_dim * sizes["heads"] == sizes["channels"]:
        head_dim = None
    config = GPTConfig(
        **sizes,
        kv_heads=sizes["heads"] if shared is None else _size(file, theirs, "num_key_value_heads"),
        head_dim=head_dim,
        rope_theta=_rope_theta(file, theirs),
        norm_eps=_number(file, theirs, "rms_norm_eps", 1e-6),
        tied=_flag(file, theirs, "tie_word_embeddings"),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        init_std=_number(file, theirs, "initializer_range", 0.02),
        context=_size(file, theirs, "max_position_embeddings"),
    )
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
    """The model in `folder`, on `device`, in `dtype` or that of its files; in host memory it exists once at most.

    Raises ValueError or OSError, one line, for whatever is not covered, missing or broken.
    """
    config = read_config(folder)
    stored = check_weights(config, folder)
    with torch.device("meta"):
        model = GPT(config, attention)
    model = model.to(dtype or DTYPES[stored["model.embed_tokens.weight"].dtype]).to_empty(device=device)
    load_weights(model, folder)
    return model


@torch.no_grad()
def load_weights(model: GPT, folder: str | Path) -> None:
    """Copy the weights of `folder` into `model`, tensor by tensor, cast to its dtype; raises as `check_weights`.

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
    """Where each tensor of `folder` lies, after checking, from the headers alone, that they make the model of `config`.

    Raises ValueError, one line, for a missing, unexpected or mis-shaped tensor, another architecture than `config`, or
    a file that is not safetensors.
    """
    folder = Path(folder)
    source = read_config(folder)
    free = {key: getattr(config, key) for key in ("vocab_size", "init_std", "context", "head_dim")}
    if replace(source, **free) != config or source.head_size != config.head_size:
        raise ValueError(f"{folder}: its config.json describes another model than the one that is to be filled")
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
            raise ValueError(f"{found.file}: {piece.theirs} is {found.dtype}; covered are {', '.join(DTYPES)}")
        unused.discard(piece.theirs)
    if source.tied and "lm_head.weight" in unused:
        unused.discard("lm_head.weight")
        _check_same(stored, "lm_head.weight", "model.embed_tokens.weight")
    if unused:
        name = min(unused)
        raise ValueError(f"{stored[name].file}: tensor {name} has no place in the model that config.json describes")
    return stored


def pieces(config: GPTConfig) -> Iterator[Piece]:
    """Every tensor of the Hugging Face model of `config`, and its rows here."""
    V, C, F, D = config.vocab_size or 0, config.channels, config.ffn, config.head_size
    q, kv = config.heads * D, config.kv_heads * D
    qkv = (("q", 0, q), ("k", q, kv), ("v", q + kv, kv))
    yield Piece("model.embed_tokens.weight", "embed.weight", 0, (V, C))
    for n in range(config.layers):
        there, here = f"model.layers.{n}.", f"blocks.{n}."
        yield Piece(f"{there}input_layernorm.weight", f"{here}attention_norm.weight", 0, (C,))
        for x, first, rows in qkv:
            yield Piece(f"{there}self_attn.{x}_proj.weight", f"{here}attention.qkv.weight", first, (rows, C))
            if config.qkv_bias:
                yield Piece(f"{there}self_attn.{x}_proj.bias", f"{here}attention.qkv.bias", first, (rows,))
            if config.qk_norm and x != "v":
                yield Piece(f"{there}self_attn.{x}_norm.weight", f"{here}attention.{x}_norm.weight", 0, (D,))
        yield Piece(f"{there}self_attn.o_proj.weight", f"{here}attention.out.weight", 0, (C, q))
        yield Piece(f"{there}post_attention_layernorm.weight", f"{here}mlp_norm.weight", 0, (C,))
        yield Piece(f"{there}mlp.gate_proj.weight", f"{here}mlp.gate_up.weight", 0, (F, C))
        yield Piece(f"{there}mlp.up_proj.weight", f"{here}mlp.gate_up.weight", F, (F, C))
        yield Piece(f"{there}mlp.down_proj.weight", f"{here}mlp.down.weight", 0, (C, F))
    yield Piece("model.norm.weight", "norm.weight", 0, (C,))
    if not config.tied:
        yield Piece("lm_head.weight", "head.weight", 0, (V, C))


def inventory(folder: Path) -> dict[str, Stored]:
    """Every tensor in the safetensors of `folder`, one file or the shards that an index names, from their headers."""
    index = folder / "model.safetensors.index.json"
    placed: Any = {}
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif index.is_file():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise ValueError(f"{index}: no weight_map that says which tensor lies in which file")
        for name in placed.values():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*\.safetensors", name):
                raise ValueError(f"{index}: {name!r} is not the name of a safetensors file beside it")
        files = sorted(set(placed.values()))
    else:
        pickled = next(iter(sorted(folder.glob("*.bin"))), None)
        also = f" ({pickled.name} is not read: a pickle can run code; save the model as safetensors)" if pickled else ""
        raise FileNotFoundError(f"{folder}: no model.safetensors and no model.safetensors.index.json{also}")
    stored: dict[str, Stored] = {}
    for name in files:
        for tensor, found in _header(folder / name).items():
            if tensor in stored or placed.get(tensor, name) != name:
                raise ValueError(f"{found.file}: {tensor} is in more than one file, or not where the index says")
            stored[tensor] = found
    absent = sorted(placed.keys() - stored.keys())
    if absent:
        raise ValueError(f"{folder / placed[absent[0]]}: no tensor {absent[0]}, which {index.name} places there")
    return stored


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; ValueError or FileNotFoundError, one line, where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: no such file; give a folder with config.json and safetensors") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: not a JSON object")
    return content


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, not a dictionary
            return {name: Stored(file, tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: no such file, but the index names it") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def _check_same(stored: dict[str, Stored], name: str, other: str) -> None:
    if stored[name][1:] == stored[other][1:]:
        with safe_open(stored[name].file, framework="pt") as a, safe_open(stored[other].file, framework="pt") as b:
            if torch.equal(a.get_tensor(name), b.get_tensor(other)):
                return
    raise ValueError(f"{stored[name].file}: {name} differs from {other}, but tie_word_embeddings=true")


def _check_covered(file: Path, theirs: dict[str, Any]) -> None:
    for key, values in COVERED.items():
        _refuse_unless(file, key, theirs.get(key, values[0]), values)
    kinds = theirs.get("layer_types")
    for n, kind in enumerate(kinds if isinstance(kinds, list) else []):
        _refuse_unless(file, f"layer_types[{n}]", kind, ("full_attention",))
    if kinds is not None and not isinstance(kinds, list):
        raise ValueError(f"{file}: layer_types={kinds!r} must be a list")


def _rope_theta(file: Path, theirs: dict[str, Any]) -> float:
    """The base of the rotary frequencies; ValueError where they are scaled or cover a part of the head."""
    place = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(place) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{file}: {place}={rope!r} must be an object")
    for key in ("rope_type", "type"):
        _refuse_unless(file, f"{place}.{key}", rope.get(key, "default"), ("default",))
    _refuse_unless(file, f"{place}.partial_rotary_factor", rope.get("partial_rotary_factor"), (1.0, None))
    for key, value in rope.items():
        if isinstance(value, dict):
            raise ValueError(
                f"{file}: {place}.{key}={json.dumps(value)[:80]} is not covered yet; one rope for all layers"
            )
    return _number(file, rope if "rope_theta" in rope else theirs, "rope_theta", 10000.0)


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
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{file}: {key}={value!r} must be a number above 0")
    return float(value)


def _flag(file: Path, theirs: dict[str, Any], key: str) -> bool:
    value = theirs.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{file}: {key}={value!r} must be true or false")
    return value
