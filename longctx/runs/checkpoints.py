"""Checkpoints: Lightning's format, holding only tensors and plain values, so that loading never
runs code from a file.

A checkpoint appears under its name only when it is whole on disk; `last.ckpt` points at the newest.
It holds weights, optimizer state, random state, the counters of the run and its configuration,
enough to continue exactly.
"""

from __future__ import annotations

import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longctx import files
from longctx.files import by_step
from longctx.runs import run_folder

FORMAT = 2
TO_RESUME = {"state_dict", "optimizer_states", "meter", "random", "steps_done"}


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write `checkpoint` to `path`: under another name, to the disk, then renamed.

    Raises OSError where it cannot be written, or the folder of the run is gone.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path.parent}: the folder of the run is gone, so no checkpoint can be written"
        )
    try:
        with files.whole(path) as partial, open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:  # what torch's zip writer makes of a full disk
        raise OSError(
            f"{path}: the checkpoint could not be written; is the disk full? ({error})"
        ) from error


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def tidy(folder: Path, keep: int) -> None:
    """Point last.ckpt at the newest checkpoint and delete all but the newest `keep`, and what a
    kill left half-written.
    """
    found = run_folder.checkpoints(folder)
    with files.whole(folder / "checkpoints" / "last.ckpt") as link:
        link.symlink_to(found[-1].name)
    for path in [*found[:-keep], *(folder / "checkpoints").glob(".step-*.ckpt")]:
        path.unlink()


def describe(
    config: Any, data_fingerprint: str, world_size: int, kernel_lock: dict[str, Any] | None
) -> dict[str, Any]:
    """What every checkpoint of a run says about it."""
    about = {
        "format": FORMAT,
        "config": run_folder.plain(config),
        "data": data_fingerprint,
        "world_size": world_size,
    }
    return about | {"kernel_lock": kernel_lock}


def read(path: Path, parts: Collection[str] = ("state_dict",)) -> dict[str, Any]:
    """The checkpoint at `path`, mapped from disk; ValueError if it is missing, none of ours, or
    lacks one of `parts`.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint")
    checkpoint = opened(path)
    if checkpoint["longctx"].get("format") != FORMAT:
        written = checkpoint["longctx"].get("format")
        raise ValueError(f"{path}: written in format {written}, this version reads {FORMAT}")
    missing = sorted(set(parts) - checkpoint.keys()) or sorted(
        {"config", "data"} - checkpoint["longctx"].keys()
    )
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
        "numpy": (
            str(kind),
            [int(key) for key in keys],
            int(position),
            int(has_gauss),
            float(gauss),
        ),
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


def verify(path: Path) -> None:
    """Raise ValueError, saying what to do, where a part of the checkpoint at `path` is not what was
    written.

    What is no zip file is left to torch, which cannot open it.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except zipfile.BadZipFile:
        return
    except PermissionError:
        raise
    except (
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
    ):  # places, flags that cannot be
        damaged = "its directory"
    if damaged is None:
        return
    raise ValueError(f"{path}: damaged, {damaged} is not what was written; {_remedy(path)}")


def _remedy(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    place = path.resolve()
    older = sorted(
        (x for x in place.parent.glob("step-*.ckpt") if by_step(x) < by_step(place)), key=by_step
    )
    instead = (
        f"delete it to go on from {older[-1]}" if older else "start anew: there is no older one"
    )
    return f"copy it here again, or {instead}"


def opened(path: Path) -> dict[str, Any]:
    """The content of the checkpoint at `path`, its tensors still on disk; ValueError if it is none
    of ours.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: cannot be read safely, it holds more than tensors and plain values"
        ) from error
    except PermissionError:
        raise
    except (RuntimeError, EOFError, KeyError, ValueError, OSError) as error:
        ours = path.resolve().match("checkpoints/step-*.ckpt")
        remedy = f"; {_remedy(path)}" if ours else ""
        raise ValueError(
            f"{path}: not a checkpoint, or not a whole one: torch cannot open it{remedy}"
        ) from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("longctx"), dict):
        raise ValueError(
            f"{path}: a checkpoint of another program; longctx reads those that train.py wrote"
        )
    return checkpoint
