"""Weights of Hugging Face folders. Nothing in a folder is run: JSON and safetensors only.

Which models are covered, and how their config.json and their tensors are to be read, is in
`longctx.hf.families`: the models there compute in transformers what GPT computes here.
"""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from longctx import hub_snapshot
from longctx.attention.description import AttentionConfig
from longctx.hf.families import asked_of as asked_of
from longctx.hf.families import read_config as read_config
from longctx.hf.stored import DTYPES, shards_of
from longctx.model.gpt import GPT, build
from longctx.spec.model_config import GPTConfig


def pretrained(
    folder: str | Path,
    attention: AttentionConfig | str = "flash",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> GPT:
    """Return the model in `folder` on `device`, in `dtype` or that of most of its tensors, but for
    `model.exact`; in host memory it exists once at most.

    Raises ValueError or OSError, one line, for whatever is not covered, missing or broken.
    """
    config, folder = read_config(folder), Path(folder)
    stored = format_of(config).check_weights(config, folder)
    ((usual, _),) = Counter(tensor.dtype for tensor in stored.values()).most_common(1)
    with torch.device("meta"):
        model = build(config, attention)
    for name, weight in model.named_parameters():
        if name not in model.exact:
            weight.data = weight.data.to(dtype or DTYPES[usual])
    model.to_empty(device=device)
    load_weights(model, folder)
    return model


def format_of(config: GPTConfig) -> Any:
    """Return the module that reads and writes folders of this kind of model."""
    return importlib.import_module(config.folders)


def load_weights(model: GPT, folder: str | Path) -> None:
    """Copy the weights of `folder` into `model`, tensor by tensor, cast to its dtype; raises as its
    format's `check_weights`.

    Rows of a larger vocabulary than the folder's stay. A rank copies its rows of a sharded weight.
    """
    format_of(model.config).load_weights(model, Path(folder))


def with_weights(name: str, key: str) -> Path:
    """Return the folder of `name`, given as `key`, with its weights.

    Weights of a model of the Hub are downloaded unless the cache has them. Raises ValueError or
    OSError, one line, if that cannot be.
    """
    return hub_snapshot.folder(name, key, shards_of(hub_snapshot.folder(name, key)))
