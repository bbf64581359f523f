"""Weights of Hugging Face folders. Nothing in a folder is run: JSON and safetensors only.

Which models are covered, and how their config.json and their tensors are to be read, stands in
`longctx.model.families`: the models there compute in transformers what GPT computes here.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longctx import hub_snapshot, untrusted
from longctx.attention.description import AttentionConfig
from longctx.model.families import has_family, multimodal, read_model
from longctx.model.families.family import EMBEDDING, LM_HEAD
from longctx.model.gpt import GPT, build
from longctx.spec.model_config import GPTConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Tensors that are computed, not learned; old Llama files have them.
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# MXFP4: values of four bits with a power of two for every 32, as gpt-oss's folders have experts.
# NAME_blocks (experts, rows, columns / 32, 16) has two values in a byte, the low bits first, and
# NAME_scales (experts, rows, columns / 32) a byte s for the factor 2^(s - 127) of 32 values (OCP
# Microscaling Formats 1.0). They are read as the tensor NAME (experts, columns, rows) in bf16,
# which holds every such value exactly.
BLOCKS, SCALES = "_blocks", "_scales"
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of bits 000 to 111; then negative
# What a folder does not decide; positions may be stretched, see context_extension.py.
NOT_OF_FOLDER = ("vocab_size", "init_std", "context", "head_dim", "rope_theta", "rope_scaling")


class Stored(NamedTuple):
    """The place of a tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    name: str  # there
    scales: Any = None  # the Stored of its factors, if it is in MXFP4


def read_config(folder: str | Path, by_transformers: str = "auto") -> GPTConfig:
    """The model of `folder`/config.json. `by_transformers` says if transformers computes it:
    "auto", if no family here has its model_type; "always"; "never".

    Raises ValueError or FileNotFoundError naming the first key and value that is not covered.
    """
    if by_transformers == "never" or (by_transformers == "auto" and has_family(folder)):
        return read_model(folder)[1]
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"{folder}: transformers has to compute this model: pip install 'transformers>=5'"
        )
    from longctx.model import transformers_folder

    return transformers_folder.read_config(Path(folder))


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
        model = build(config, attention)
    if config.transformers:
        model.cast(dtype or DTYPES[next(iter(stored.values())).dtype])
    else:
        model.to(dtype or DTYPES[stored[EMBEDDING].dtype])
        for piece in read_model(folder)[0].tensors(config):
            if piece.fold.widens:
                weight = model.get_parameter(piece.ours)
                weight.data = weight.data.float()
    model.to_empty(device=device)
    load_weights(model, folder)
    return model


@torch.no_grad()
def load_weights(
    model: GPT, folder: str | Path, write: Callable[[Tensor, Tensor, int], None] | None = None
) -> None:
    """Copy the weights of `folder` into `model`, tensor by tensor, cast to its dtype; raises as
    `check_weights`.

    Rows of a larger vocabulary than the folder's keep what they hold. `write` copies (weight,
    values, first row) to a weight of which this rank holds a part.
    """
    write = write or _copy_rows
    if model.config.transformers:
        from longctx.model import transformers_folder

        transformers_folder.load_weights(model, Path(folder), write)
        return
    stored = check_weights(model.config, folder)
    parameters = dict(model.named_parameters())
    family, source = read_model(folder)
    for piece in family.tensors(source):
        tensor = piece.fold.load(values_of(stored[piece.theirs]))
        write(parameters[piece.ours], tensor, piece.first)
        del tensor


def values_of(stored: Stored) -> Tensor:
    """Return the tensor that is stored there."""
    # opened for each tensor: the pages of a file count as ours for as long as it is mapped
    with safe_open(stored.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(stored.name)
    return tensor if stored.scales is None else dequantized(tensor, values_of(stored.scales))


def shape_of_mxfp4(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor that blocks and scales of these shapes are, () for none."""
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != 16:
        return ()
    return blocks[0], blocks[2] * 32, blocks[1]


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return (experts, columns, rows) in bf16, of MXFP4."""
    table = torch.tensor([*MXFP4, *(-x for x in MXFP4)])
    result = torch.empty(shape_of_mxfp4(blocks.shape, scales.shape), dtype=torch.bfloat16)
    # One expert at a time: as indices its values take 16 times the memory
    for expert, bits, powers in zip(result, blocks, scales, strict=True):
        values = table[torch.stack((bits & 15, bits >> 4), dim=-1).int()].flatten(-2)
        expert.copy_((values * torch.exp2(powers[..., None].float() - 127)).flatten(1).t())
    return result


def _copy_rows(weight: Tensor, values: Tensor, first: int) -> None:
    weight[first : first + len(values)].copy_(values)


def check_weights(config: GPTConfig, folder: str | Path) -> dict[str, Stored]:
    """Return the place of each tensor of `folder`, if they make the model of `config`.

    Only headers are read. Raises ValueError, one line, for a missing, unexpected or mis-shaped
    tensor, another architecture than `config`, or a file that is not safetensors.
    """
    folder = Path(folder)
    if config.transformers:  # which checks names and shapes when it reads
        return inventory(folder)
    family, source = read_model(folder)

    # the architecture
    free = {key: getattr(config, key) for key in NOT_OF_FOLDER}
    free["experts"] = replace(source.experts, balance=config.experts.balance)
    if replace(source, **free) != config or source.head_size != config.head_size:
        raise ValueError(
            f"{folder}: its config.json describes another model than the one that is to be filled"
        )
    if (config.vocab_size or 0) < (source.vocab_size or 0):
        raise ValueError(
            f"model.vocab_size={config.vocab_size}: {folder} has weights for "
            f"{source.vocab_size:,} tokens; use at least that, or null"
        )

    # tensor by tensor
    stored = text_tensors(folder)
    unused = {name for name in stored if not BUFFERS.fullmatch(name)}
    unused = {name for name in unused if not family.leaves_out(name, source)}
    for piece in family.tensors(source):
        name, shape = piece.theirs, piece.shape
        tensor = stored.get(name)
        if tensor is None:
            raise ValueError(f"{folder}: no tensor {name}, which its config.json asks for")
        if tensor.shape != shape:
            raise ValueError(
                f"{tensor.file}: {name} is {list(tensor.shape)}, by config.json it is {list(shape)}"
            )
        if tensor.dtype not in DTYPES:
            covered = ", ".join(DTYPES)
            raise ValueError(f"{tensor.file}: {name} is {tensor.dtype}; covered are {covered}")
        unused.discard(name)

    # what is left over
    if source.tied and LM_HEAD in unused:
        unused.discard(LM_HEAD)
        _check_same(stored, LM_HEAD, EMBEDDING)
    if unused:
        name = min(unused)
        raise ValueError(
            f"{stored[name].file}: tensor {name} has no place in the model that config.json "
            "describes"
        )
    return stored


def with_weights(name: str, key: str) -> Path:
    """Return the folder of `name`, given as `key`, with its weights.

    Weights of a model of the Hub are downloaded unless the cache has them. Raises ValueError or
    OSError, one line, if that cannot be.
    """
    folder = hub_snapshot.folder(name, key)
    if hub_snapshot.model_name(name) is None:
        return folder
    shards = shards_of(folder)
    folder = hub_snapshot.folder(name, key, shards)
    if absent := next((file for file in shards if not (folder / file).exists()), None):
        raise FileNotFoundError(
            f"{key}={name}: the model has no {absent}, and pickles, which can run code, are not "
            "read; give one in safetensors"
        )
    return folder


def text_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of the text model in `folder`, by their names in a folder of its own."""
    stored = inventory(folder)
    packed = [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]
    for name in packed:
        if name + SCALES not in stored:
            continue
        blocks, scales = stored.pop(name + BLOCKS), stored.pop(name + SCALES)
        shape = shape_of_mxfp4(blocks.shape, scales.shape)
        both = {blocks.dtype, scales.dtype}
        dtype = "BF16" if both == {"U8"} else "MXFP4 that is not in bytes"
        stored[name] = blocks._replace(shape=shape, dtype=dtype, scales=scales)
    if not multimodal.wraps(folder):
        return stored
    named = {multimodal.text_name(name): tensor for name, tensor in stored.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def inventory(folder: Path) -> dict[str, Stored]:
    """Every tensor in the safetensors of `folder`, one file or the shards that an index names, from
    their headers.
    """
    if not any(os.path.lexists(folder / name) for name in (SINGLE, INDEX)):
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
    for name in [SINGLE] if os.path.lexists(folder / SINGLE) else shards_of(folder):
        header = _header(folder / name)
        if twice := sorted(stored.keys() & header.keys()):
            raise ValueError(
                f"{folder / name}: {twice[0]} is in {stored[twice[0]].file.name}, too; a tensor "
                "belongs in one file"
            )
        stored |= header
    return stored


def shards_of(folder: Path) -> list[str]:
    """Return the files that an index names; only safetensors beside it are accepted. Without an
    index there is one file.
    """
    index = folder / INDEX
    if not os.path.lexists(index):
        return [SINGLE]
    placed = untrusted.read_settings(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index}: no weight_map that says which tensor lies in which file")
    for name in placed.values():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*\.safetensors", name):
            raise ValueError(f"{index}: {name!r} is not the name of a safetensors file beside it")
    return sorted(set(placed.values()))


def _header(file: Path) -> dict[str, Stored]:
    try:
        untrusted.check_file(file, within=file.parent)
        # safetensors itself reads a header of at most 100 MB
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()  # not a dictionary
            slices = {name: opened.get_slice(name) for name in names}
            return {
                name: Stored(file, tuple(x.get_shape()), x.get_dtype(), name)
                for name, x in slices.items()
            }
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: no such file, but the index names it") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def _check_same(stored: dict[str, Stored], name: str, other: str) -> None:
    one, two = values_of(stored[name]), values_of(stored[other])
    if one.dtype != two.dtype or not torch.equal(one, two):
        raise ValueError(
            f"{stored[name].file}: {name} differs from {other}, but tie_word_embeddings=true"
        )
