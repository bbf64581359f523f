"""The model that is evaluated, built on its device: whole, or the rows of it that a rank holds.

Weights are read one after the other, by rows, so that no process ever has more of them in memory
than its device is to hold, and one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from longctx.attention.description import AttentionConfig
from longctx.config.model_config import GPTConfig
from longctx.model import GPT, huggingface
from longctx.model.restore import copy_weights
from longctx.parallel import sharding
from longctx.runs import checkpoints, run_folder


def skeleton(config: GPTConfig, attention: AttentionConfig, dtype: torch.dtype) -> GPT:
    """A model in eval mode without memory for its weights; linear layers are in `dtype`."""
    with torch.device("meta"):
        model = GPT(config, attention)
    round_matrices(model, dtype)
    return model.eval().requires_grad_(False)


def round_matrices(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights of linear layers once, as autocast would in every forward; everything else
    stays as it is.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)


def build_model(
    file: Path,
    attention: AttentionConfig,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    shard: Callable[[GPT], None] = lambda model: None,
) -> GPT:
    """The model of `file`, a checkpoint or a Hugging Face folder, as in `skeleton` but on `device`.

    `shard` spreads the weights, which hold nothing yet, over ranks; each then reads its rows alone.
    Raises ValueError or OSError, one line, where the weights are not those of the model.
    """
    if run_folder.is_hugging_face(file):
        model = skeleton(huggingface.read_config(file), attention, dtype)
        shard(model)
        model.to_empty(device=device)
        huggingface.load_weights(model, file, sharding.write)
        return model
    checkpoint = checkpoints.read(file)
    config = GPTConfig.of_saved(checkpoint["longctx"]["config"]["model"])
    model = skeleton(config, attention, dtype)
    shard(model)
    model.to_empty(device=device)
    copy_weights(model, file, checkpoint, sharding.write_rows_of)
    return model
