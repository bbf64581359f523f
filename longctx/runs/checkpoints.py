"""Checkpoints of a run: their content, the ones that are kept, and how one is read.

A checkpoint is a folder of safetensors and JSON, so reading it never runs code: weights, optimizer
state, random state, the counters of the run and its configuration, enough to continue exactly.
`last.ckpt` points at the newest. Tensors are cut by rows over the ranks that write. Any number of
ranks reads back the rows that it needs, and none ever holds a whole model.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from longctx import files
from longctx.runs import checkpoint_index, run_folder
from longctx.runs.checkpoint_index import FORMAT, INDEX
from longctx.runs.checkpoint_index import Damaged as Damaged
from longctx.runs.checkpoint_index import verify as verify
from longctx.runs.checkpoint_write import Sharded
from longctx.untrusted import opened

READABLE = frozenset((torch.float32, torch.bfloat16, torch.float16))  # of weights and moments
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*READABLE, torch.uint8)}


class SlicedTensor:
    """A tensor in files, cut by rows; tensor[first:last] reads only those, and raises ValueError if
    they are not as the JSON says.
    """

    def __init__(self, folder: Path, name: str, entry: Mapping[str, Any]) -> None:
        self.folder, self.name = folder, name
        self.shape = torch.Size(entry["shape"])
        self.ndim = len(self.shape)
        self.dtype = DTYPES[entry["dtype"]]
        self.parts: list[tuple[str, int, int]] = [tuple(part) for part in entry["rows"]]

    def __getitem__(self, at: slice) -> Tensor:
        start, stop, _ = at.indices(self.shape[0])
        parts, reached = [torch.empty(0, *self.shape[1:], dtype=self.dtype)], start
        for file, first, count in sorted(self.parts, key=lambda part: part[1]):
            end = min(stop, first + count)
            if first <= reached < end:
                if not self.folder.exists():  # its run has deleted it
                    checkpoint_index.read(self.folder)
                with safe_open(self.folder / file, framework="pt") as tensors:
                    part: Tensor = tensors.get_slice(self.name)[reached - first : end - first]
                if part.dtype != self.dtype or part.shape != (end - reached, *self.shape[1:]):
                    raise ValueError(f"{self.folder / file}: {self.name} differs from {INDEX}")
                parts.append(part)
                reached = end
        if reached < stop:
            raise ValueError(f"{self.folder}: {INDEX} lists no file for some rows of {self.name}")
        # A single part is mapped instead of copied
        return parts[1] if len(parts) == 2 else torch.cat(parts)


def contents(
    plain: dict[str, Any], weights: dict[str, Sharded], optimizer: dict[str, Any], names: list[str]
) -> tuple[dict[str, Any], dict[str, Sharded]]:
    """Return metadata and tensors of a checkpoint, for `Saving`.

    In `plain` "longctx" is about the run and "random" is random_state(). This rank has `weights`,
    by name, and the state of an `optimizer`, which trains the weights `names` in this order.
    """
    tensors, scalars = dict(weights), dict[str, dict[str, float]]()
    for number, values in optimizer["state"].items():
        weight = weights[names[number]]
        for key, value in values.items():
            # torch's optimizers shard their states as the weights
            value = value.to_local() if hasattr(value, "to_local") else value
            if getattr(value, "shape", None) not in ((), weight.part.shape):  # a resume refuses it
                state = f"optimizer: {key} of {names[number]}: give a tensor of one number or of"
                raise ValueError(f"{state} its weight's shape {[*weight.part.shape]}")
            if value.ndim:
                tensors[f"optimizer.{number}.{key}"] = Sharded(value, weight.shape, weight.rows_of)
            else:
                scalars.setdefault(str(number), {})[key] = float(value)
    of_optimizer = {"param_groups": optimizer["param_groups"], "optimizer_scalars": scalars}
    return {**plain, **of_optimizer}, tensors


def read(path: Path) -> dict[str, Any]:
    """Return the checkpoint at `path`, with `SlicedTensor` for tensors; ValueError if it is
    missing, damaged or of another version.
    """
    content = checkpoint_index.read(path)
    if content.get("format") != FORMAT:
        written = f"written in format {content.get('format')} by another version of longctx"
        raise ValueError(f"{path}: {written}; this one reads {FORMAT}")
    with opened(path):
        states: dict[int, dict[str, Any]] = {
            int(number): {key: torch.tensor(value) for key, value in values.items()}
            for number, values in content.pop("optimizer_scalars").items()
        }
        weights = {}
        for name, entry in content.pop("tensors").items():
            tensor = SlicedTensor(path, name, entry)
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                states.setdefault(int(number), {})[key] = tensor
            else:
                weights[name] = tensor
        optimizer = {"state": states, "param_groups": content.pop("param_groups")}
        return content | {"state_dict": weights, "optimizer_states": [optimizer]}


def flaw(
    tensor: SlicedTensor | Tensor, shape: Iterable[int], dtypes: Collection[torch.dtype] = READABLE
) -> str | None:
    """Return why a checkpoint's tensor cannot be read into one of `shape`, in one of `dtypes`; None
    if it can. torch's fused kernels write out of bounds if a state has another shape.
    """
    if tensor.shape != torch.Size(shape):
        return f"{list(tensor.shape)} in the checkpoint, {list(shape)} in the model"
    if tensor.dtype not in dtypes:
        names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"{str(tensor.dtype).removeprefix('torch.')} in the checkpoint instead of {names}"
    return None


def check_states(
    path: Path,
    checkpoint: Mapping[str, Any],
    expected: Sequence[tuple[torch.Size, Collection[str] | None]],
) -> None:
    """Raise ValueError unless the optimizer's state in the checkpoint at `path` is of the weights
    that it trains: `expected` has the shape and the names of the states of each (None: any).
    """
    # A state is a count of steps, or a tensor of the shape of its weight
    problem = f"{path}: its optimizer state is not"
    (optimizer,) = checkpoint["optimizer_states"]
    state = optimizer["state"]
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    names = {number: set(values) for number, values in state.items()}
    of_run = {n: set(names) for n, (_, names) in enumerate(expected) if names is not None}
    if numbers != list(range(len(expected))) or (of_run and names != of_run):
        raise ValueError(f"{problem} of the run's optimizer, which trains {len(expected)} weights")
    for number, values in state.items():
        shape, known = expected[number]
        for key, tensor in values.items():
            is_scalar = key == "step" or (known is None and tensor.ndim == 0)
            if wrong := flaw(tensor, () if is_scalar else shape):
                raise ValueError(f"{problem} of the model: {key} of weight {number} is {wrong}")


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or infinity in it, None if all are finite."""
    # In one pass: torch.isfinite().all() takes 50 times as long on a CPU. All are queued before the
    # first is waited for
    checks = {
        name: torch.isfinite(torch.stack(torch.aminmax(tensor))).all()
        for name, tensor in tensors.items()
        if tensor.numel()
    }
    return next((name for name, is_finite in checks.items() if not is_finite), None)


def tidy(folder: Path, step: int, keep: int, best_step: int = 0) -> list[Path]:
    """Point last.ckpt at the checkpoint after `step` and best.ckpt at the one after `best_step`, if
    it is there; hide all but these and the newest `keep`. Return the hidden ones and the leftovers
    of killed processes, to delete.
    """
    # Only whole checkpoints up to `step` count, so none goes for a damaged or foreign one
    saved, best = (run_folder.checkpoint_path(folder, n) for n in (step, best_step))
    paths: list[Path] = []
    for path in run_folder.checkpoints(folder):
        with suppress(Damaged):
            verify(path, reads=False)
            paths += [path] if run_folder.step_of(path) <= step else []
    _link("last.ckpt", saved)
    if best in paths:
        _link("best.ckpt", best)
    else:
        files.remove(saved.with_name("best.ckpt"))
    for path in paths[:-keep]:
        if path != best:
            checkpoint_index.set_aside(path)
    files.to_disk(saved.parent)  # or a power failure could bring names back
    return list(saved.parent.glob(".step-*.ckpt*"))


def _link(name: str, target: Path) -> None:
    path = target.with_name(name)
    if not path.is_symlink():  # a copy, from a program that follows links
        files.remove(path)
    with files.atomic(path) as link:
        link.symlink_to(target.name)


def random_state() -> dict[str, Any]:
    """Return the state of every random number generator of this process as plain values."""
    algorithm, keys, *position = np.random.get_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in gpus],
        "python": random.getstate(),
        "numpy": (algorithm, np.asarray(keys).tolist(), *position),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue from `random_state()`; the state of another number of GPUs is left out."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        gpus = [torch.tensor(values, dtype=torch.uint8) for values in state["cuda"]]
        torch.cuda.set_rng_state_all(gpus)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    algorithm, keys, *position = state["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *position))
