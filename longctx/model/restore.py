"""The model of a checkpoint, its weights mapped from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.config.model_config import AttentionConfig, GPTConfig, LoraConfig
from longctx.model.gpt import GPT
from longctx.model.lora import add as add_lora


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
