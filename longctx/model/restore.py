"""The model of a checkpoint: its weights mapped from disk, or copied into a model that is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.config.model_config import AttentionConfig, GPTConfig, LoraConfig
from longctx.model.gpt import GPT
from longctx.model.lora import add as add_lora
from longctx.model.lora import merged_weights


def mapped_model(
    path: Path,
    checkpoint: dict[str, Any],
    config: GPTConfig,
    backend: AttentionConfig | str,
    lora: LoraConfig,
) -> GPT:
    """The model of `config` with the weights of a checkpoint, mapped from disk.

    Raises ValueError if they are not those of this model.
    """
    with torch.device("meta"):
        model = GPT(config, backend)
        model = model if lora.rank is None else add_lora(model, lora)
    weights = {
        name.removeprefix("model."): x if isinstance(x, Tensor) else x[:]
        for name, x in checkpoint["state_dict"].items()
    }
    try:
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"{path}: its weights are not those of its model: {error}") from error
    return model


def copy_weights(
    model: GPT,
    path: Path,
    checkpoint: dict[str, Any],
    lora: LoraConfig,
    copy: Callable[[Any, Tensor], None],
) -> None:
    """Copy the weights of a checkpoint into `model`, a plain GPT, one after the other; what LoRA
    trained is added to them.

    `copy` is given what has the rows of a weight, and the weight. Raises ValueError if they are not
    those of this model.
    """
    weights = {name.removeprefix("model."): x for name, x in checkpoint["state_dict"].items()}
    if lora.rank is not None:
        weights = merged_weights(weights, lora)
    mine = {name: x.shape for name, x in model.named_parameters()}
    for name in sorted({*weights, *mine}):
        theirs = weights[name].shape if name in weights else None
        if theirs != mine.get(name):
            raise ValueError(
                f"{path}: its weights are not those of its model: {name} is {_shown(theirs)} in "
                f"the checkpoint, {_shown(mine.get(name))} in the model"
            )
    for name, x in model.named_parameters():
        copy(weights[name], x)


def _shown(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(list(shape))
