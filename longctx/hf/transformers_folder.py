"""Hugging Face folders of models that transformers computes: read, checked, loaded, written.

transformers reads and writes its own formats, such as experts in one tensor each; here is what it
must not do: run code of others, read pickles, or leave a weight at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from longctx.hf.stored import Stored, inventory
from longctx.hf.transformers_config import TransformersConfig
from longctx.hf.transformers_model import empty_model
from longctx.model.lora import ADDED
from longctx.parallel import sharding
from longctx.spec.parts import Piece


def read_weights(config: TransformersConfig, folder: Path) -> Any:
    """Return transformers' model with the weights of `folder`, in host memory.

    Raises ValueError, one line, for a missing, unexpected or mis-shaped tensor.
    """
    settings = empty_model(config.settings).config
    try:
        opened: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=settings,
            dtype="auto",
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"{folder}: transformers cannot read its weights: {reason}") from error
    whole, found = opened
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, found[f"{kind}_keys"])):
            problem = "its weights are not those of its config.json"
            raise ValueError(f"{folder}: {kind} tensor {names[0]}: {problem}")
    return whole


def check_weights(config: TransformersConfig, folder: Path) -> dict[str, Stored]:
    """Return the position of each tensor; transformers checks names and shapes when it reads."""
    return inventory(folder)


@torch.no_grad()
def load_weights(model: Any, folder: Path) -> None:
    """Copy the weights of `folder` into `model`; see `model_folder.load_weights`. Every rank has
    transformers read all of them into host memory.
    """
    values = read_weights(model.config, folder).state_dict()
    for name, weight in model.named_parameters():
        if name.endswith(ADDED):
            continue
        if weight.ndim:
            sharding.write(weight, values[model.name_of(name)])
        else:
            weight.copy_(values[model.name_of(name)])


def writer(
    model: Any,
    tokenizers: Path,
    generation: dict[str, Any],
    context: int,
    dtype: torch.dtype | None,
    limit: int,
) -> Callable[[Path], None]:
    """Return a function that writes config.json and weights into a folder, in files of about
    `limit` bytes, as transformers does.
    """
    whole = empty_model(model.config.settings)
    parameters = {
        model.name_of(name): x.detach().to(x.dtype if name in model.exact else dtype or x.dtype)
        for name, x in model.named_parameters()
    }
    whole.load_state_dict(parameters, strict=False, assign=True)
    whole.tie_weights()
    if getattr(whole.config, "max_position_embeddings", None) is not None:
        whole.config.max_position_embeddings = context
    whole.config._attn_implementation = None
    whole.config.dtype = dtype or model.embed.weight.dtype
    return partial(whole.save_pretrained, max_shard_size=limit)


def pieces(model: Any) -> Iterator[Piece]:
    """Yield every tensor of a folder, as rows of a parameter of `model`."""
    for name, weight in model.named_parameters():
        yield Piece(model.name_of(name), name, 0, tuple(weight.shape))
