"""The proof that transformers and longctx compute the same model: every way to a model asks once.

A small one with random weights and the first layers, each kind among them, is computed twice: by
transformers as its config.json says, and by us. Weights and ranks play no part.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longctx import untrusted
from longctx.attention import Mask
from longctx.config.fields import refuse
from longctx.hf.transformers_config import TransformersConfig
from longctx.hf.transformers_model import NOT_REPLACED, TransformersModel, empty_model
from longctx.parallel.devices import dtype_of
from longctx.transformers import (
    NAME,
    differences,
    layers_to_check,
    lengths_to_check,
    refuse_broken_kernels,
)

WORDS = 1024  # of the vocabulary
WINDOW = 29  # at most, so that documents are longer
PACKING = "; data.packing=false trains each document in a sequence of its own"
_proven: set[str] = set()  # settings as JSON


def require(config: TransformersConfig) -> None:
    """Prove the model on this CPU unless it is proven: no way to it leads past this."""
    if json.dumps(config.settings, sort_keys=True) not in _proven:
        with torch.device("cpu"):  # models are built on "meta"
            prove(config, "cpu", "fp32", config.context or WORDS, packing=False)


def prove(
    config: TransformersConfig, device: str, precision: str, seq_len: int, packing: bool = True
) -> None:
    """Raise ValueError, one line, if logits are not those of transformers' own attention, or, with
    `packing`, documents of a sequence see one another.
    """
    # In fp32 the smallest mistake shows; then `precision` must give about the same.
    # A few layers of the same kinds show whatever all of them do
    small = small_of(config, seq_len)
    kind, dtype = small.settings["model_type"], dtype_of(precision)
    lengths = lengths_to_check(small.settings.get("sliding_window"), seq_len // 2)
    lengths = lengths[: 2 if packing else 1]
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    with torch.device("meta"):
        model = TransformersModel(small, "naive", is_proven=True)
    model.to_empty(device=device)

    def packed(documents: list[Tensor]) -> Tensor:
        logits: Tensor = model(torch.cat(documents, dim=1), mask=Mask.documents(numbers[None]))
        return logits

    with model.random_state_kept(), torch.no_grad():
        torch.manual_seed(0)
        model.init_weights()
        # Ones and zeros would hide mistakes
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
        # Theirs has the same weights and its own attention
        theirs = empty_model(small.settings, device, "eager")
        weights = {model.name_of(name): x for name, x in model.named_parameters()}
        theirs.load_state_dict(weights, strict=False)
        theirs.tie_weights()
        model.eval()
        with untrusted.named(f"model_type={kind}", "it cannot be computed: {}", (Exception,)):
            problem, is_right_alone = differences(theirs, NAME, lengths, packed)
            off = 0.0 if dtype == torch.float32 else rounding(model, lengths[0], dtype)
    remedy = PACKING if is_right_alone else ""
    allowed = 8 * torch.finfo(dtype).eps
    refuse(
        (not model.documents.calls, f"model_type={kind}: {NOT_REPLACED}"),
        (problem, f"model_type={kind}: {problem}{remedy}"),
        (not off <= allowed, f"model_type={kind}: in {precision} its logits are {off:.0%} off"),
    )
    _proven.add(json.dumps(config.settings, sort_keys=True))


def small_of(config: TransformersConfig, seq_len: int) -> TransformersConfig:
    """Return the model with few layers and few words, and a window shorter than documents."""
    # A window that no sequence of `seq_len` leaves stays
    settings = empty_model(config.settings).config
    refuse_broken_kernels(settings, seq_len)
    layers = min(layers_to_check(settings), config.layers)
    few = {key: value and 0 for key, value in vars(settings).items() if key.endswith("_token_id")}
    few["vocab_size"] = min(WORDS, config.vocab_size or WORDS)
    if config.window is not None and config.window < seq_len:
        few["sliding_window"] = min(WINDOW, config.window)
    small = config.with_layers(range(layers))
    return replace(small, transformers={"config": small.settings | few})


def rounding(model: Any, tokens: int, dtype: torch.dtype) -> float:
    """Return how far logits are off in `dtype`; the median, since a token may get other experts."""
    words = model.embed.num_embeddings
    ids = torch.arange(tokens, device=model.embed.weight.device).remainder(words)[None]
    exact = model(ids)
    model.cast(dtype)
    return float(((model(ids).float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
