"""Checkpoints: Lightning's format, holding only tensors and plain values, so that loading never runs code from a file.

A checkpoint appears under its name only when it is whole on disk; `last.ckpt` points at the newest. It holds weights,
optimizer state, random state, the counters of the run and its configuration, enough to continue exactly.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from longctx import files
from longctx.attention.config import AttentionConfig
from longctx.data import Tokenizer
from longctx.model import GPT, GPTConfig, lora
from longctx.model.checkpoint import mapped_model, opened, verify
from longctx.model.config import LoraConfig
from longctx.training import runs

FORMAT = 2
TO_RESUME = {"state_dict", "optimizer_states", "meter", "random", "steps_done"}


class WholeFiles(TorchCheckpointIO):
    """Lightning's file writer, made atomic: to a temporary name, to the disk, then renamed; into a folder that is there."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{target.parent}: the folder of the run is gone, so no checkpoint can be written")
        try:
            with files.whole(target) as partial, open(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except RuntimeError as error:
            # torch reports a full disk as a RuntimeError of its zip writer
            raise OSError(f"{target}: the checkpoint could not be written; is the disk full? ({error})") from error


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def tidy(folder: Path, keep: int) -> None:
    """Point last.ckpt at the newest checkpoint and delete all but the newest `keep`, and what a kill left half-written."""
    found = runs.checkpoints(folder)
    with files.whole(folder / "checkpoints" / "last.ckpt") as link:
        link.symlink_to(found[-1].name)
    for path in [*found[:-keep], *(folder / "checkpoints").glob(".step-*.ckpt")]:
        path.unlink()


def describe(config: Any, data_fingerprint: str, world_size: int, kernel_lock: dict[str, Any] | None) -> dict[str, Any]:
    """What every checkpoint of a run says about it."""
    about = {"format": FORMAT, "config": runs.plain(config), "data": data_fingerprint, "world_size": world_size}
    return about | {"kernel_lock": kernel_lock}


def read(path: Path, parts: Collection[str] = ("state_dict",)) -> dict[str, Any]:
    """The checkpoint at `path`, mapped from disk; ValueError if it is missing, none of ours, or lacks one of `parts`."""
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint")
    checkpoint = opened(path)
    if checkpoint["longctx"].get("format") != FORMAT:
        written = checkpoint["longctx"].get("format")
        raise ValueError(f"{path}: written in format {written}, this version reads {FORMAT}")
    missing = sorted(set(parts) - checkpoint.keys()) or sorted({"config", "data"} - checkpoint["longctx"].keys())
    if missing:
        raise ValueError(f"{path}: not a whole checkpoint, it has no {', '.join(missing)}")
    return checkpoint


def random_state() -> dict[str, Any]:
    """The state of every random number generator of this process, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue from `random_state()`; a state of other GPUs than there are now is left out."""
    torch.set_rng_state(state["torch"].clone())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([x.clone() for x in state["cuda"]])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def load_model(
    path: str | Path, device: torch.device | str = "cpu", attention: AttentionConfig | str | None = None
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """The trained model, its tokenizer and its configuration, from a run's folder or one checkpoint file.

    A folder means its newest checkpoint. `attention` replaces the backend that the run trained with. Raises ValueError
    naming `path` where there is no such thing, or one that is no longer what was written.
    """
    given = Path(path)
    if given.is_dir():
        found = runs.checkpoints(given)
        if not found:
            what = "the run has no checkpoint yet" if (given / "config.yaml").exists() else "not the folder of a run"
            if (given / "adapter_config.json").exists():
                what = "an adapter, which lacks the weights it adds to; give the run, or an export without adapter=true"
            raise ValueError(f"checkpoint={given}: {what}")
        given = found[-1]
    elif not given.exists():
        raise ValueError(f"checkpoint={given}: no such file or folder")
    verify(given)
    checkpoint = read(given)
    config = checkpoint["longctx"]["config"]
    folder = given.resolve().parent.parent
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"checkpoint={given}: {folder} has no tokenizer.json; leave checkpoints in the run's folder")
    backend = AttentionConfig(**config["attention"]) if attention is None else attention
    added = LoraConfig(**config.get("lora", {}))
    model = mapped_model(given, checkpoint, GPTConfig.of_saved(config["model"]), backend, added)
    model = model if added.rank is None else lora.merge(model.float())
    return model.to(device).eval(), Tokenizer.load(folder), config
