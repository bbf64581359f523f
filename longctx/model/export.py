"""Write a GPT as a Hugging Face folder: config.json, generation_config.json, weights, tokenizer.

It opens in transformers and in what reads its formats. The folder appears under its name only when
it is complete.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from longctx import files, untrusted
from longctx.config.model_config import GPTConfig
from longctx.config.parts import Piece
from longctx.model.families import family_of, multimodal, read_model
from longctx.model.families.family import Family
from longctx.model.gpt import GPT
from longctx.model.huggingface import inventory, values_of
from longctx.runs.checkpoints import not_finite

SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
SHORT_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    model: GPT,
    tokenizer_folder: str | Path,
    out: str | Path,
    context: int | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    wrapper: Path | None = None,
) -> None:
    """Write `model` to the new folder `out`, in files of at most about `shard_bytes`.

    `context` is the longest input, by default that of `model.config`. Without `dtype` each
    weight keeps its own. Tokenizer files come from `tokenizer_folder`. `wrapper` is the multimodal
    folder that the model takes its place in again. Raises ValueError if `out` has something in it
    or transformers has no class for the model, OSError if it cannot be written; then nothing is
    left behind.
    """
    out, tokenizers = Path(out), Path(tokenizer_folder)
    check_out(out)
    context = context or model.config.context
    if context is None:
        raise ValueError(
            f"{out}: the context is not known, which becomes max_position_embeddings; give it"
        )
    if not (tokenizers / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{tokenizers}: no tokenizer.json to go with the model")

    # Refused models and tokenizers raise here, before gigabytes are written
    generation = _generation(tokenizers)
    # Each kind of model has a writer of config.json and weights
    write: Callable[[Path], None]
    if model.config.transformers:
        from longctx.model import transformers_folder

        write = partial(transformers_folder.write_model, model, context, dtype, shard_bytes)
    else:
        write = _writer(model, tokenizers, context, dtype, shard_bytes, wrapper)
    # A reader never sees half a model: the folder is renamed to `out` when it is whole
    try:
        with files.atomic(out) as folder:
            folder.mkdir(parents=True)
            write(folder)
            write_json(folder / "generation_config.json", generation)
            for name in TOKENIZER_FILES:
                if (tokenizers / name).is_file():
                    limit = untrusted.TOKENIZER_SIZE
                    untrusted.copy_file(tokenizers / name, folder / name, limit, within=tokenizers)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error


def _writer(
    model: GPT,
    tokenizers: Path,
    context: int,
    dtype: torch.dtype | None,
    shard_bytes: int,
    wrapper: Path | None,
) -> Callable[[Path], None]:
    """Return a function that writes config.json and weights into a folder; refuses now."""
    family = family_of(model.config) if wrapper is None else read_model(wrapper)[0]
    keys = family.write(model.config, context)
    family.check_tokenizer(tokenizers / "tokenizer.json")
    # These ids are in generation_config.json too, so readers of either agree
    generation = _generation(tokenizers)
    keys |= {f"{key}_token_id": generation.get(f"{key}_token_id") for key in ("bos", "eos", "pad")}
    keys |= {"dtype": str(dtype or model.embed.weight.dtype).removeprefix("torch.")}
    keys = keys if wrapper is None else multimodal.wrapped(wrapper, keys)
    tensors = list(_of_model(model, family, dtype))
    if wrapper is not None:
        tensors = list(_in_wrapper(tensors, wrapper))

    def write(folder: Path) -> None:
        write_json(folder / "config.json", keys)
        for name in multimodal.PROCESSOR_FILES:
            if wrapper is not None and (wrapper / name).is_file():
                limit = untrusted.SETTINGS_SIZE
                untrusted.copy_file(wrapper / name, folder / name, limit, within=wrapper)
        _write_weights(tensors, shard_bytes, folder)

    return write


def check_out(out: Path) -> None:
    """Raise ValueError unless `out` is free: not there, or an empty folder."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(
            f"{out}: exists already and is not an empty folder; give the name of a new one"
        )


def architecture(config: GPTConfig, context: int) -> dict[str, Any]:
    """Return config.json of `config` for `context` tokens.

    Raises ValueError with the key that no class of transformers has next to the others.
    """
    return family_of(config).write(config, context)


class _Tensor(NamedTuple):
    """A tensor to write: about how many bytes it has, and what reads it when its turn comes."""

    name: str
    size: int
    read: Callable[[], Tensor]


def _of_model(model: GPT, family: Family, dtype: torch.dtype | None) -> Iterator[_Tensor]:
    """Yield the tensors of `model` as `family` names and stores them."""
    parameters = dict(model.named_parameters())
    common = dtype or model.embed.weight.dtype
    parts: dict[str, list[tuple[Tensor, Piece]]] = {}
    for piece in family.tensors(model.config):
        parts.setdefault(piece.theirs, []).append((parameters[piece.ours], piece))
    for name, pieces in parts.items():
        piece = pieces[0][1]
        size = common.itemsize * torch.Size(piece.shape).numel()
        own = common if piece.fold.widens else dtype
        own = own if piece.fold.narrows else torch.float32
        yield _Tensor(name, size, partial(_whole, pieces, own))


def _in_wrapper(tensors: Iterable[_Tensor], wrapper: Path) -> Iterator[_Tensor]:
    """Yield `tensors` by their names in the multimodal folder `wrapper`, then all others there."""
    stored = inventory(wrapper)
    names = {multimodal.text_name(name): name for name in stored}
    for tensor in tensors:
        yield tensor._replace(name=names[tensor.name])
    for name, entry in stored.items():
        if multimodal.text_name(name) is None:
            # An upper limit: sizes decide only where shards begin
            size = 4 * torch.Size(entry.shape).numel()
            yield _Tensor(name, size, partial(values_of, entry))


def _write_weights(all_tensors: Sequence[_Tensor], shard_bytes: int, folder: Path) -> None:
    by_name = {tensor.name: tensor for tensor in all_tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    size, flawed = 0, None
    for file, names in split.filename_to_tensors.items():
        # A shard at a time: the weights need not fit in memory twice
        tensors = {name: by_name[name].read() for name in names}
        flawed = flawed or not_finite(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files.as_umask_allows(folder / file)
        size += sum(x.nbytes for x in tensors.values())
    warn_of_not_finite(flawed)
    if split.is_sharded:
        index = {"metadata": {"total_size": size}, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def warn_of_not_finite(name: str | None) -> None:
    """Print a warning that the tensor `name`, if any, is written with NaN or infinity in it."""
    if name is not None:
        print(
            f"warning: {name} has numbers that are not finite: the weights are damaged, or, with "
            "dtype=fp16, larger than the 65,504 that it can hold",
            file=sys.stderr,
        )


def _whole(pieces: Sequence[tuple[Tensor, Piece]], dtype: torch.dtype | None) -> Tensor:
    """Return a tensor of a folder; its pieces add up."""
    first, *others = (piece.fold.save(x.detach()[piece.rows]) for x, piece in pieces)
    whole = sum(others, first)
    return whole if dtype is None else whole.to(dtype)


def _generation(tokenizers: Path) -> dict[str, Any]:
    """Return the tokenizer's generation_config.json, else one with its BOS and EOS ids."""
    if (tokenizers / "generation_config.json").is_file():
        return untrusted.read_settings(tokenizers / "generation_config.json")
    described = untrusted.read_settings(tokenizers / "tokenizer.json", untrusted.TOKENIZER_SIZE)
    vocabulary = described.get("model", {}).get("vocab", {})
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    ids |= {token["content"]: token["id"] for token in described.get("added_tokens", [])}
    settings = untrusted.read_settings(tokenizers / "tokenizer_config.json")
    special: dict[str, Any] = {}
    for kind, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if kind in ("bos_token", "eos_token") and isinstance(text, str) and text in ids:
            special[f"{kind}_id"] = ids[text]
    return {"_from_model_config": True, **special}


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as the JSON files of a Hugging Face folder are written."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
