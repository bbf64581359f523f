"""Checkpoints of a run: what one holds, which are kept, and how one is read.

A checkpoint is a folder of safetensors and JSON, so reading it never runs code: weights, optimizer
state, random state, the counters of the run and its configuration, enough to continue exactly.
`last.ckpt` points at the newest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longctx import files
from longctx.files import by_step
from longctx.runs import checkpoint_folder, checkpoint_index, run_folder
from longctx.runs.checkpoint_folder import Sharded
from longctx.runs.checkpoint_write import ALONE, Saving, Writers

FORMAT = 2  # of what a checkpoint holds; checkpoint_index.FORMAT is that of the folder


class Damaged(ValueError):
    """Raised for a checkpoint that differs from the one that a run wrote, with what is wrong."""

    def __init__(self, path: Path, what: str) -> None:
        self.what = what
        target = path.resolve()  # last.ckpt is a link
        saved = run_folder.checkpoints(target.parent.parent)
        older = [earlier for earlier in saved if by_step(earlier) < by_step(target)]
        remedy = f", or delete it to resume from {older[-1]}" if older else ""
        super().__init__(f"{path}: {what}; copy it here again{remedy}")


def describe(
    config: Any, data_fingerprint: str, world_size: int, kernel_lock: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the part of a checkpoint, under `longctx`, that tells which run wrote it."""
    return {
        "format": FORMAT,
        "config": run_folder.plain(config),
        "data": data_fingerprint,
        "world_size": world_size,
        "kernel_lock": kernel_lock,
    }


def saving(
    path: Path,
    about: Mapping[str, Any],
    state: Mapping[str, Any],
    weights: Mapping[str, Sharded],
    optimizer: Mapping[str, Any] | None = None,
    trained: Sequence[str] = (),
    writers: Writers = ALONE,
    replaced: Callable[[], list[Path]] = list,
) -> Saving:
    """Return a checkpoint to write to `path`.

    `about` comes from `describe`, `state` holds random_state() as "random" and plain values. This
    rank has `weights`, by name, and the state of an `optimizer` that trains those named `trained`,
    in its order.
    """
    tensors = dict(weights)
    scalars: dict[str, dict[str, float]] = {}
    optimizer = optimizer or {"state": {}, "param_groups": []}
    for number, values in optimizer["state"].items():
        weight = weights[trained[number]]
        for key, value in values.items():
            if value.ndim:
                shape = torch.Size([weight.shape[0], *value.shape[1:]])
                tensors[f"optimizer.{number}.{key}"] = Sharded(value, shape, weight.rows_of)
            else:
                scalars.setdefault(str(number), {})[key] = float(value)
    plain = {
        "longctx": dict(about),
        **state,
        "param_groups": optimizer["param_groups"],
        "optimizer_scalars": scalars,
    }
    return Saving(path, plain, tensors, writers, replaced)


def read(path: Path) -> dict[str, Any]:
    """Return the checkpoint at `path`, with `Rows` for tensors; ValueError if it is missing,
    damaged or of another version.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such checkpoint")
    try:
        content = checkpoint_folder.read(path)
    except ValueError as error:
        raise Damaged(path, f"not a whole checkpoint: {error}") from error
    formats = content["format"], content["longctx"].get("format")
    if formats != (checkpoint_index.FORMAT, FORMAT):
        raise ValueError(
            f"{path}: written in format {formats} by another version of longctx; this one reads "
            f"{(checkpoint_index.FORMAT, FORMAT)}"
        )
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
    optimizer = {"state": states, "param_groups": content.pop("param_groups")}
    return content | {"state_dict": weights, "optimizer_states": [optimizer]}


def verify(path: Path) -> None:
    """Raise Damaged, with a remedy, unless the bytes of the checkpoint at `path` match their
    checksums.
    """
    try:
        damaged = checkpoint_index.verify(path)
    except ValueError as error:
        raise Damaged(path, f"not a whole checkpoint: {error}") from error
    if damaged is not None:
        raise Damaged(path, f"damaged, the checksum of {damaged} differs")


def check_states(
    path: Path,
    checkpoint: Mapping[str, Any],
    expected: Sequence[tuple[torch.Size, Collection[str] | None]],
) -> None:
    """Raise ValueError unless the optimizer's state in the checkpoint at `path` is of the weights
    that it trains, by number the shape and the names of the states of each (None: any).

    A state is a count of steps, or a tensor of the shape of its weight.
    """
    ((state, groups),) = ((x["state"], x["param_groups"]) for x in checkpoint["optimizer_states"])
    numbers = [number for group in groups for number in group["params"]]
    names = {number: set(values) for number, values in state.items()}
    of_run = {n: set(names) for n, (_, names) in enumerate(expected) if names is not None}
    if numbers != list(range(len(expected))) or (of_run and names != of_run):
        raise ValueError(
            f"{path}: its optimizer state is not of the optimizer of the run, which trains "
            f"{len(expected)} weights"
        )
    for number, values in state.items():
        shape, known = expected[number]
        for key, x in values.items():
            is_scalar = key == "step" or (known is None and x.ndim == 0)
            if wrong := checkpoint_folder.flaw(x, torch.Size() if is_scalar else shape):
                raise ValueError(
                    f"{path}: its optimizer state is not of the model: {key} of weight {number} is "
                    f"{wrong}"
                )


def check_finite(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Raise Damaged if a weight or a state of the optimizer is NaN or infinite."""
    (optimizer,) = checkpoint["optimizer_states"]
    states = {
        f"{key} of the optimizer for weight {number}": x
        for number, values in optimizer["state"].items()
        for key, x in values.items()
    }
    name = checkpoint_folder.not_finite(checkpoint["state_dict"] | states)
    if name is not None:
        raise Damaged(path, f"{name} is not finite")


def tidy(folder: Path, step: int, keep: int, best_step: int = 0) -> list[Path]:
    """Point last.ckpt at the checkpoint after `step` and best.ckpt at the one after `best_step`, if
    it is there; hide all but these and the newest `keep`, and return the hidden ones, with those of
    killed processes, for `checkpoint_index.delete`.

    Only whole checkpoints up to `step` count, so none goes for a damaged or foreign one.
    """
    saved, best = (run_folder.checkpoint_path(folder, n) for n in (step, best_step))
    earlier = [path for path in run_folder.checkpoints(folder) if by_step(path) <= by_step(saved)]
    paths = [path for path in earlier if checkpoint_index.is_intact(path, reads=False)]
    _link("last.ckpt", saved)
    if best in paths:
        _link("best.ckpt", best)
    else:
        files.remove(saved.with_name("best.ckpt"))
    leftovers = list(saved.parent.glob(".step-*.ckpt*"))
    hidden = [checkpoint_index.set_aside(path) for path in paths[:-keep] if path != best]
    files.to_disk(saved.parent)  # or a power failure could bring names back
    return hidden + [path for path in leftovers if path not in hidden]


def _link(name: str, target: Path) -> None:
    path = target.with_name(name)
    if not path.is_symlink():  # a copy, from a program that follows links
        files.remove(path)
    with files.atomic(path) as link:
        link.symlink_to(target.name)


def random_state() -> dict[str, Any]:
    """Return the state of every random number generator of this process as plain values."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": [x.tolist() for x in gpus],
        "python": random.getstate(),
        "numpy": (
            str(algorithm),
            [int(key) for key in keys],
            int(position),
            int(has_gauss),
            float(gauss),
        ),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue from `random_state()`; the state of another number of GPUs is left out."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.tensor(x, dtype=torch.uint8) for x in state["cuda"]])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    algorithm, keys, *position = state["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *position))
