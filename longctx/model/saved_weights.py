"""The weights of a checkpoint, checked and copied into a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.model import lora
from longctx.model.gpt import GPT, build
from longctx.model.packed import is_packed
from longctx.runs import checkpoints
from longctx.spec.model_config import GPTConfig, LoraConfig


def checked_skeleton(
    path: Path, checkpoint: dict[str, Any], config: GPTConfig, added: LoraConfig
) -> GPT:
    """Return the model of `config` with LoRA's additions, without memory for its weights; raise
    ValueError unless the checkpoint at `path` has its weights.

    Names, shapes, dtypes and layout in the file are compared; no weight is read.
    """
    with torch.device("meta"):
        model = build(config, "naive")
        model = model if added.rank is None else lora.add(model, added)
    weights = checkpoint["state_dict"]
    mine = {f"model.{name}": x for name, x in model.named_parameters()}
    for name in [*mine, *(weights.keys() - mine.keys())]:
        wrong: str | None = "in the checkpoint, missing in the model"
        if name not in weights:
            wrong = f"missing in the checkpoint, {list(mine[name].shape)} in the model"
        elif name in mine:
            # Frozen weights may lie in 16 bits, trained ones never do
            is_exact = mine[name].requires_grad or is_packed(mine[name])
            dtypes = {mine[name].dtype} if is_exact else checkpoints.READABLE
            wrong = checkpoints.flaw(weights[name], mine[name].shape, dtypes)
        if wrong:
            raise ValueError(f"{path}: its weights are not those of its model: {name} is {wrong}")
    return model


def lora_of(checkpoint: dict[str, Any]) -> LoraConfig:
    return LoraConfig(**checkpoint["longctx"]["config"].get("lora", {}))


def copy_weights(
    model: GPT, path: Path, checkpoint: dict[str, Any], write: Callable[[Tensor, Any], None]
) -> None:
    """Copy the weights of a checkpoint into `model`, one after the other, with what LoRA trained
    added to them. What LoRA is to add to `model` itself is left alone.

    `write` is given the weight and its values, which may still be in the file. Raises ValueError if
    they are not those of this model.
    """
    config = lora_of(checkpoint)
    checked_skeleton(path, checkpoint, model.config, config)
    weights = {name.removeprefix("model."): x for name, x in checkpoint["state_dict"].items()}
    for name, x in model.named_parameters():
        if name in weights and not name.endswith(lora.ADDED):
            write(x, lora.MergedRows(name, weights, config.factor))
