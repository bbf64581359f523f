"""Hugging Face folders of the families: tensors become the weights of a GPT, and a GPT a folder.

The models of `longctx.hf.families` compute in transformers what GPT computes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from longctx import files
from longctx.config.fields import refuse, refuse_first
from longctx.hf.families import FAMILIES, read_model, write_config
from longctx.hf.families.config_json import text_name, wraps
from longctx.hf.families.family import EMBEDDING, LM_HEAD
from longctx.hf.stored import DTYPES, Stored, inventory, values_of, warn_of_not_finite, write_json
from longctx.model.gpt import GPT
from longctx.parallel import sharding
from longctx.runs.checkpoints import not_finite
from longctx.spec.model_config import GPTConfig
from longctx.spec.parts import Piece


def check_weights(config: GPTConfig, folder: Path) -> dict[str, Stored]:
    """Return the position of each tensor of `folder`, if they make the model of its config.json and
    `config` has room for their vocabulary.

    Only headers are read. Raises ValueError, one line, for a missing, unexpected or mis-shaped
    tensor, or a file that is not safetensors.
    """
    family, source = read_model(folder)

    has_no_room = (config.vocab_size or 0) < (source.vocab_size or 0)
    given = f"model.vocab_size={config.vocab_size}: {folder} has weights for"
    refuse((has_no_room, f"{given} {source.vocab_size:,} tokens; use at least that, or null"))

    # tensor by tensor
    stored = {family.named(name): x for name, x in text_tensors(folder).items()}
    unused = {name for name in stored if not family.leaves_out(name, source)}
    for piece in family.tensors_of(source, stored):
        name, shape = family.named(piece.theirs), piece.shape
        tensor = stored.get(name)
        if tensor is None:
            raise ValueError(f"{folder}: no tensor {name}, which its config.json asks for")
        given = f"{tensor.file}: {name} is"
        shapes = f"{given} {list(tensor.shape)}, by config.json it is {list(shape)}"
        dtypes = f"{given} {tensor.dtype}; covered are {', '.join(DTYPES)}"
        refuse((tensor.shape != shape, shapes), (tensor.dtype not in DTYPES, dtypes))
        unused.discard(name)

    # what is left over: some folders of tied models have the head too
    if source.tied and LM_HEAD in unused:
        unused.discard(LM_HEAD)
        head, embedding = values_of(stored[LM_HEAD]), values_of(stored[EMBEDDING])
        is_other = head.dtype != embedding.dtype or not torch.equal(head, embedding)
        given = f"{stored[LM_HEAD].file}: {LM_HEAD} differs from {EMBEDDING}"
        refuse((is_other, f"{given}, but tie_word_embeddings=true"))
    # A tensor without a place would be left out without a word
    problem = "has no place in the model that config.json describes"
    refuse_first(f"{stored[name].file}: tensor {name} {problem}" for name in sorted(unused))
    return stored


def text_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of the text model in `folder`, by their names in a folder of its own."""
    stored = inventory(folder)
    if not wraps(folder):
        return stored
    named = {text_name(name): tensor for name, tensor in stored.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


@torch.no_grad()
def load_weights(model: GPT, folder: Path) -> None:
    """Copy the weights of `folder` into `model`; see `model_folder.load_weights`."""
    stored = check_weights(model.config, folder)
    parameters = dict(model.named_parameters())
    family, source = read_model(folder)
    for piece in family.tensors_of(source, stored):
        tensor = piece.fold.load(values_of(stored[family.named(piece.theirs)]))
        sharding.write(parameters[piece.ours], tensor, piece.first)
        del tensor


def writer(
    model: GPT,
    tokenizers: Path,
    generation: dict[str, Any],
    context: int,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> Callable[[Path], None]:
    """Return a function that writes config.json and weights into a folder; refuses now."""
    keys = write_config(model.config, context)
    family = FAMILIES[keys["model_type"]]
    family.check_tokenizer(tokenizers / "tokenizer.json")
    # These ids are in generation_config.json too, so readers of either agree
    keys |= {f"{key}_token_id": generation.get(f"{key}_token_id") for key in ("bos", "eos", "pad")}
    keys |= {"dtype": str(dtype or model.embed.weight.dtype).removeprefix("torch.")}
    parameters, common = dict(model.named_parameters()), dtype or model.embed.weight.dtype
    shares = shares_of(family.tensors(model.config))
    split = split_state_dict_into_shards_factory(
        shares,
        get_storage_size=lambda pieces: common.itemsize * torch.Size(pieces[0].shape).numel(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )

    # Norms and corrections of routers keep the precision in which they compute
    def tensor(pieces: list[Piece]) -> Tensor:
        saved = joined(pieces, lambda piece: parameters[piece.ours].detach()[piece.rows])
        return saved.to(torch.float32 if pieces[0].ours in model.exact else dtype or saved.dtype)

    def write(folder: Path) -> None:
        write_json(folder / "config.json", keys)
        size, flawed = 0, None
        for file, names in split.filename_to_tensors.items():
            # A shard at a time: the weights need not fit in memory twice
            tensors = {name: tensor(shares[name]) for name in names}
            flawed = flawed or not_finite(tensors)
            save_file(tensors, folder / file, metadata={"format": "pt"})
            files.as_umask_allows(folder / file)
            size += sum(x.nbytes for x in tensors.values())
        warn_of_not_finite(flawed)
        if split.is_sharded:
            index = {"metadata": {"total_size": size}, "weight_map": split.tensor_to_filename}
            write_json(folder / "model.safetensors.index.json", index)

    return write


def pieces(model: GPT) -> Iterator[Piece]:
    """Yield every tensor by its name in transformers, as rows of a parameter of `model`."""
    keys = write_config(model.config, model.config.context or 1)
    family = FAMILIES[keys["model_type"]]
    for piece in family.tensors(model.config):
        yield piece._replace(theirs=family.named(piece.theirs))


def shares_of(pieces: Iterator[Piece]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor of a folder, by its name; mostly it is one."""
    shares: dict[str, list[Piece]] = {}
    for piece in pieces:
        shares.setdefault(piece.theirs, []).append(piece)
    return shares


def joined(pieces: list[Piece], rows: Callable[[Piece], Tensor]) -> Tensor:
    """Return the folder's tensor that `pieces` share, from the `rows` of each in our parameter."""
    saved: list[Tensor] = [piece.fold.save(rows(piece)) for piece in pieces]
    return saved[0] if len(saved) == 1 else torch.cat(saved, dim=1).flatten(0, 1)
