"""Checkpoints: write, read, verify; and the state of the random number generators.

A checkpoint is a file of torch in Lightning's layout, or, where the weights of a run are sharded, a
folder (see sharded_checkpoint.py). It holds only tensors and plain values, so that loading one
never runs code from it: weights, optimizer state, random state, the counters of the run and its
configuration, enough to continue exactly. It appears under its name only once it is complete on
disk; `last.ckpt` points at the newest.
"""

from __future__ import annotations

import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longctx import files
from longctx.files import by_step
from longctx.runs import run_folder, sharded_checkpoint

FORMAT = 2


class Sharded(NamedTuple):
    """What one rank has of a weight that is cut by rows."""

    part: Tensor  # its rows
    shape: torch.Size  # of the whole
    rows_of: list[slice]  # of each rank


TO_RESUME = {"state_dict", "optimizer_states", "meter", "random", "steps_done"}


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def describe(
    config: Any, data_fingerprint: str, world_size: int, kernel_lock: dict[str, Any] | None
) -> dict[str, Any]:
    """The part of a checkpoint, under `longctx`, that tells which run wrote it."""
    return {
        "format": FORMAT,
        "config": run_folder.plain(config),
        "data": data_fingerprint,
        "world_size": world_size,
        "kernel_lock": kernel_lock,
    }


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically: to a temporary name, to the disk, then renamed.

    Raises FileNotFoundError where the folder of the run is gone, OSError where the disk is full.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path.parent}: the folder of the run is gone, so no checkpoint can be written"
        )
    try:
        with files.atomic(path) as partial, open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        # torch reports a full disk as a RuntimeError of its zip writer
        raise OSError(
            f"{path}: the checkpoint could not be written; is the disk full? ({error})"
        ) from error


def tidy(folder: Path, keep: int) -> None:
    """Point last.ckpt at the newest checkpoint; delete all but the newest `keep`, and what a killed
    process left half-written.
    """
    paths = run_folder.checkpoints(folder)
    with files.atomic(folder / "checkpoints" / "last.ckpt") as link:
        link.symlink_to(paths[-1].name)
    for path in [*paths[:-keep], *(folder / "checkpoints").glob(".step-*.ckpt*")]:
        files.remove(path)


def read(path: Path, parts: Collection[str] = ("state_dict",)) -> dict[str, Any]:
    """The checkpoint at `path`, its tensors mapped from disk, or `Rows` where it is sharded.

    Raises ValueError where it is missing, not one of ours, or lacks one of `parts`.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such checkpoint")
    checkpoint = opened(path)
    about = checkpoint["longctx"]
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{path}: written in format {about.get('format')}, this version reads {FORMAT}"
        )
    missing = sorted(set(parts) - checkpoint.keys()) or sorted({"config", "data"} - about.keys())
    if missing:
        raise ValueError(f"{path}: not a whole checkpoint, it has no {', '.join(missing)}")
    return checkpoint


def save_shards(
    state: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    weights: Mapping[str, Sharded],
    trained: Sequence[str],
    about: Mapping[str, Any],
    path: Path,
    rank: int,
    ranks: int,
    agree: Callable[[str | None], str | None],
) -> None:
    """Write the checkpoint of sharded `weights`, name → what this rank has of one; all ranks call
    it.

    `optimizer` is a state_dict, whose tensors are cut as the weights are; `trained` are the names
    of these, as it numbers them. The rest is plain.
    """
    tensors: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    scalars: dict[str, dict[str, float]] = {}

    def put(name: str, part: Tensor, weight: Sharded) -> None:
        if len(part):
            tensors[name] = part
        shape = [weight.shape[0], *part.shape[1:]]
        index[name] = sharded_checkpoint.entry(shape, part.dtype, weight.rows_of)

    for name, weight in weights.items():
        put(name, weight.part, weight)
    for number, values in optimizer["state"].items():
        for key, value in values.items():
            if value.ndim:
                put(f"optimizer.{number}.{key}", value, weights[trained[number]])
            else:
                scalars.setdefault(str(number), {})[key] = float(value)
    plain = {
        "longctx": dict(about),
        **state,
        "random": _plain_random(state["random"]),
        "param_groups": optimizer["param_groups"],
        "optimizer_scalars": scalars,
    }
    sharded_checkpoint.save(path, plain, tensors, index, rank, ranks, agree)


def _of_shards(path: Path) -> dict[str, Any]:
    """A sharded checkpoint in the layout of a file, with `Rows` for tensors."""
    content = sharded_checkpoint.read(path)
    try:
        states: dict[int, dict[str, Any]] = {
            int(number): {key: torch.tensor(value) for key, value in values.items()}
            for number, values in content.pop("optimizer_scalars").items()
        }
        weights = {}
        for name, rows in content.pop("tensors").items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                states.setdefault(int(number), {})[key] = rows
            else:
                weights[name] = rows
        groups = content.pop("param_groups")
        content["random"] = _random_of_plain(content["random"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a whole checkpoint ({error})") from error
    optimizer = {"state": states, "param_groups": groups}
    return content | {"state_dict": weights, "optimizer_states": [optimizer]}


def opened(path: Path) -> dict[str, Any]:
    """The content of the checkpoint at `path`, whichever parts it has; ValueError if no run wrote
    it.
    """
    if path.is_dir():
        return _of_shards(path)
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


def verify(path: Path) -> None:
    """Raise ValueError, with a remedy, where the checkpoint at `path` is not what was written.

    Each part of the zip file has a checksum, which torch does not look at. A file that is no zip
    file at all passes: `opened` refuses it.
    """
    try:
        if path.is_dir():
            damaged = sharded_checkpoint.verify(path)
        else:
            with zipfile.ZipFile(path) as file:
                damaged = file.testzip()
    except zipfile.BadZipFile:
        return
    except PermissionError:
        raise
    except (OSError, RuntimeError, ValueError, EOFError, struct.error, zlib.error):
        damaged = "its directory"  # offsets or flags that cannot be
    if damaged is not None:
        raise ValueError(f"{path}: damaged, {damaged} is not what was written; {_remedy(path)}")


def _remedy(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    target = path.resolve()  # last.ckpt is a link
    older = sorted(
        (x for x in target.parent.glob("step-*.ckpt") if by_step(x) < by_step(target)), key=by_step
    )
    if older:
        return f"copy it here again, or delete it to go on from {older[-1]}"
    return "copy it here again, or start anew: there is no older one"


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


def _plain_random(state: dict[str, Any]) -> dict[str, Any]:
    return state | {
        "torch": state["torch"].tolist(),
        "cuda": [x.tolist() for x in state["cuda"]],
    }


def _random_of_plain(state: dict[str, Any]) -> dict[str, Any]:
    return state | {
        "torch": torch.tensor(state["torch"], dtype=torch.uint8),
        "cuda": [torch.tensor(x, dtype=torch.uint8) for x in state["cuda"]],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue from `random_state()`; the state of another number of GPUs is left out."""
    torch.set_rng_state(state["torch"].clone())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([x.clone() for x in state["cuda"]])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
