"""A GPT as a Hugging Face folder: config.json, generation_config.json, safetensors, tokenizer.
Opens in transformers and in what reads its formats.

The folder appears under its name only when it is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from longctx import files
from longctx.config.model_config import GPTConfig
from longctx.model.gpt import GPT
from longctx.model.huggingface import Piece, pieces, read_json

SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# How Qwen2 splits text, after NFC. transformers 5 opens every qwen2 model so, whatever its
# tokenizer.json says.
QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NAMES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
}
SHORT_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    model: GPT,
    tokenizer_folder: str | Path,
    out: str | Path,
    context: int | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model` to the new folder `out`, in its own `dtype` or another, in files of at most
    about `shard_bytes`.

    `context` is the length that it is for, by default that of `model.config`. Token files come from
    `tokenizer_folder`. Raises ValueError where `out` has something in it or transformers has no
    class for the model, OSError if it cannot be written; then nothing is left behind.
    """
    out, tokenizers = Path(out), Path(tokenizer_folder)
    check_out(out)
    context = context or model.config.context
    if context is None:
        raise ValueError(
            f"{out}: the context is not known, which becomes max_position_embeddings; give it"
        )
    dtype = dtype or model.embed.weight.dtype
    if not (tokenizers / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{tokenizers}: no tokenizer.json to go with the model")
    described = architecture(model.config, context)
    if described["model_type"] == "qwen2":
        _check_words(tokenizers / "tokenizer.json")
    generation = _generation(tokenizers)
    special = {
        f"{key}_token_id": generation.get(f"{key}_token_id") for key in ("bos", "eos", "pad")
    }
    described |= special | {"dtype": str(dtype).removeprefix("torch.")}
    try:
        with files.atomic(out) as folder:
            folder.mkdir(parents=True)
            _write_json(folder / "config.json", described)
            _write_json(folder / "generation_config.json", generation)
            for name in TOKENIZER_FILES:
                if (tokenizers / name).is_file():
                    shutil.copyfile(tokenizers / name, folder / name)
            _write_weights(model, dtype, shard_bytes, folder)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error


def check_out(out: Path) -> None:
    """Raise ValueError unless `out` is free: not there, or an empty folder."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(
            f"{out}: exists already and is not an empty folder; give the name of a new one"
        )


def architecture(config: GPTConfig, context: int) -> dict[str, Any]:
    """config.json of `config`; ValueError naming the combination for which transformers has no
    class.
    """
    kind = _family(config)
    if config.rope_scaling.get("rope_type") == "dynamic":
        context = config.context or context  # from which its base starts to grow
    return {
        "architectures": [f"{NAMES[kind]}ForCausalLM"],
        "model_type": kind,
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
        **_rope(config),
        **_extra(config, kind),
    }


def _family(config: GPTConfig) -> str:
    """The model_type whose class computes `config`; ValueError where there is none."""
    partly = config.window_layers is not None
    if config.qk_norm:
        kind = "qwen3"
    elif config.nope_layers or (partly and not config.qkv_bias):
        kind = "smollm3"
    elif config.qkv_bias and not config.out_bias:
        kind = "qwen2"
    else:
        kind = "mistral" if config.window is not None and not config.qkv_bias else "llama"
    words = {
        "model.qkv_bias": (
            config.qkv_bias,
            {"qwen2": True, "mistral": False}.get(kind, config.qkv_bias),
        ),
        "model.out_bias": (
            config.out_bias,
            config.qkv_bias if kind in ("llama", "qwen3", "smollm3") else False,
        ),
        "model.mlp_bias": (config.mlp_bias, config.mlp_bias and kind in ("llama", "smollm3")),
        "model.nope_layers": (config.nope_layers, config.nope_layers if kind == "smollm3" else []),
        "model.window": (config.window, config.window if kind != "llama" else None),
    }
    for key, (have, can) in words.items():
        if have != can:
            shown = str(have).lower() if isinstance(have, bool) else have
            raise ValueError(
                f"{key}={shown}: no class of transformers has it beside the model's other keys ({kind})"
            )
    if kind == "qwen2" and config.head_size * config.heads != config.channels:
        raise ValueError(
            f"model.qkv_bias=true with model.head_dim={config.head_dim}: Qwen2 has heads of channels / heads only"
        )
    if kind == "llama" and config.channels % config.heads:
        raise ValueError(
            f"model.channels={config.channels} with model.heads={config.heads}: Llama wants a multiple of the heads"
        )
    return kind


def _rope(config: GPTConfig) -> dict[str, Any]:
    """RoPE in the words of transformers 5 (rope_parameters), and in those of tools that follow it
    before version 5.
    """
    base, scaling = (
        {"rope_theta": config.rope_theta},
        dict(config.rope_scaling) or {"rope_type": "default"},
    )
    older = {"rope_scaling": scaling} if config.rope_scaling else {}
    return {"rope_parameters": scaling | base, **base, **older}


def _extra(config: GPTConfig, kind: str) -> dict[str, Any]:
    """The keys that one family has and others have not."""
    sliding = range(config.layers) if config.window_layers is None else config.window_layers
    sliding = sliding if config.window is not None else []
    types = [
        "sliding_attention" if n in sliding else "full_attention" for n in range(config.layers)
    ]
    windows: dict[str, Any] = {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "layer_types": types,
    }
    if kind.startswith("qwen") and list(sliding) == list(
        range(min(sliding, default=config.layers), config.layers)
    ):
        windows |= (
            {"max_window_layers": min(sliding)} if sliding else {}
        )  # for tools that do not know layer_types
    size = {"head_dim": config.head_size}
    extra: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias, **size},
        "mistral": {"sliding_window": config.window, **size},
        "qwen2": windows,
        "qwen3": windows | {"attention_bias": config.qkv_bias, **size},
        "smollm3": windows
        | {
            "attention_bias": config.qkv_bias,
            "mlp_bias": config.mlp_bias,
            "no_rope_layers": [int(n not in config.nope_layers) for n in range(config.layers)],
            **(size if config.head_dim is not None else {}),
        },
    }
    return extra[kind]


def _check_words(file: Path) -> None:
    """Raise ValueError for a tokenizer that transformers would replace by another when it opens a
    Qwen2 model.
    """
    described = read_json(file)
    splitting = described.get("pre_tokenizer") or {}
    first = (splitting.get("pretokenizers") or [{}])[0]
    words = (first.get("pattern") or {}).get("Regex")
    if words != QWEN2_WORDS or described.get("normalizer") != {"type": "NFC"}:
        raise ValueError(
            f"{file}: does not normalize and split text as Qwen2 does, but transformers opens a model with model.qkv_bias=true so: "
            "its tokens would be others"
        )


def _write_weights(model: GPT, dtype: torch.dtype, shard_bytes: int, folder: Path) -> None:
    parameters = dict(model.named_parameters())
    shards = list(_shards(model.config, dtype.itemsize, shard_bytes))
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        tensors = {piece.theirs: _rows(parameters[piece.ours], piece).to(dtype) for piece in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        size = dtype.itemsize * sum(x.numel() for x in parameters.values())
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": placed},
        )


def _rows(parameter: Tensor, piece: Piece) -> Tensor:
    return parameter.detach()[piece.first : piece.first + piece.shape[0]]


def _shards(config: GPTConfig, itemsize: int, most: int) -> Iterator[list[Piece]]:
    """The tensors in their order, a new shard whenever the next one would make it larger than
    `most` bytes.
    """
    shard: list[Piece] = []
    used = 0
    for piece in pieces(config):
        size = itemsize * torch.Size(piece.shape).numel()
        if shard and used + size > most:
            yield shard
            shard, used = [], 0
        shard.append(piece)
        used += size
    yield shard


def _generation(tokenizers: Path) -> dict[str, Any]:
    """generation_config.json beside the tokenizer, or one with the ids of its begin- and
    end-of-text tokens.
    """
    if (tokenizers / "generation_config.json").is_file():
        return read_json(tokenizers / "generation_config.json")
    described = read_json(tokenizers / "tokenizer.json")
    vocabulary = described.get("model", {}).get("vocab", {})
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    ids |= {token["content"]: token["id"] for token in described.get("added_tokens", [])}
    settings = tokenizers / "tokenizer_config.json"
    found: dict[str, Any] = {}
    for kind, token in (read_json(settings) if settings.is_file() else {}).items():
        text = token.get("content") if isinstance(token, dict) else token
        if kind in ("bos_token", "eos_token") and isinstance(text, str) and text in ids:
            found[f"{kind}_id"] = ids[text]
    return {"_from_model_config": True, **found}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
