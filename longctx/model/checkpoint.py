"""Checkpoints of runs, read: whether they still hold the bytes that were written, their content, their model.

Nothing of a file runs: tensors and plain values only. torch writes a CRC-32 beside every tensor of its zip file and reads
it back without a look at it, so that a flipped bit becomes a weight; comparing takes 0.2 s per GB in memory, less than
reading the file.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from longctx.attention.config import AttentionConfig
from longctx.files import by_step
from longctx.model import GPT, GPTConfig, lora
from longctx.model.config import LoraConfig


def verify(path: Path) -> None:
    """Raise ValueError, saying what to do, where a part of the checkpoint at `path` is not what was written.

    What is no zip file is left to torch, which cannot open it.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except zipfile.BadZipFile:
        return
    except PermissionError:
        raise
    except (OSError, RuntimeError, ValueError, EOFError, struct.error, zlib.error):  # places, flags that cannot be
        damaged = "its directory"
    if damaged is None:
        return
    raise ValueError(f"{path}: damaged, {damaged} is not what was written; {_remedy(path)}")


def _remedy(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    place = path.resolve()
    older = sorted((x for x in place.parent.glob("step-*.ckpt") if by_step(x) < by_step(place)), key=by_step)
    instead = f"delete it to go on from {older[-1]}" if older else "start anew: there is no older one"
    return f"copy it here again, or {instead}"


def opened(path: Path) -> dict[str, Any]:
    """The content of the checkpoint at `path`, its tensors still on disk; ValueError if it is none of ours."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: cannot be read safely, it holds more than tensors and plain values") from error
    except PermissionError:
        raise
    except (RuntimeError, EOFError, KeyError, ValueError, OSError) as error:
        ours = path.resolve().match("checkpoints/step-*.ckpt")
        remedy = f"; {_remedy(path)}" if ours else ""
        raise ValueError(f"{path}: not a checkpoint, or not a whole one: torch cannot open it{remedy}") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("longctx"), dict):
        raise ValueError(f"{path}: a checkpoint of another program; longctx reads those that train.py wrote")
    return checkpoint


def mapped_model(
    path: Path, checkpoint: dict[str, Any], config: GPTConfig, backend: AttentionConfig | str, added: LoraConfig
) -> GPT:
    """The model of `config` with the checkpoint's weights, still where they lie on disk; ValueError if they are not its own."""
    with torch.device("meta"):
        model = GPT(config, backend)
        model = model if added.rank is None else lora.add(model, added)
    weights = {name.removeprefix("model."): x for name, x in checkpoint["state_dict"].items()}
    try:
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"{path}: its weights are not those of its model: {error}") from error
    return model
