"""The model of a checkpoint, its weights mapped from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longctx.config.model_config import AttentionConfig, GPTConfig, LoraConfig
from longctx.model import lora
from longctx.model.gpt import GPT


def mapped_model(
    path: Path,
    checkpoint: dict[str, Any],
    config: GPTConfig,
    backend: AttentionConfig | str,
    added: LoraConfig,
) -> GPT:
    """The model of `config` with the checkpoint's weights, still where they lie on disk; ValueError
    if they are not its own.
    """
    with torch.device("meta"):
        model = GPT(config, backend)
        model = model if added.rank is None else lora.add(model, added)
    weights = {name.removeprefix("model."): x for name, x in checkpoint["state_dict"].items()}
    try:
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"{path}: its weights are not those of its model: {error}") from error
    return model
