"""Checkpoints: write, read, verify; and the state of the random number generators.

A checkpoint is a folder of safetensors and JSON (see checkpoint_folder.py), of which reading never
runs code: weights, optimizer state, random state, the counters of the run and its configuration,
enough to continue exactly. It appears under its name only once it is complete on disk; `last.ckpt`
points at the newest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longctx import files
from longctx.files import by_step
from longctx.runs import checkpoint_folder, checkpoint_index, run_folder, tensor_checks
from longctx.runs.checkpoint_folder import Sharded
from longctx.runs.checkpoint_write import ALONE, Saving, Writers
from longctx.runs.removal import Removal

FORMAT = 2


class Damaged(ValueError):
    """Raised for a checkpoint that is not what a run wrote; `what` is wrong with it."""

    def __init__(self, path: Path, what: str, has_remedy: bool = True) -> None:
        self.what = what
        super().__init__(f"{path}: {what}" + (f"; {_remedy(path)}" if has_remedy else ""))


def is_count(x: Any) -> bool:
    """Whether x is a whole number from 0 up that 64 bits hold."""
    return type(x) is int and 0 <= x < 2**63


def is_number(x: Any) -> bool:
    """Whether x is a finite number."""
    return is_count(x) or (type(x) is float and math.isfinite(x))


def are_counts(x: Any) -> bool:
    """Whether x are the four counts of a window: scored, real and all tokens, pairs."""
    return isinstance(x, list) and len(x) == 4 and all(map(is_count, x))


def are_spikes(x: Any) -> bool:
    """Whether x can be what Spikes.state() returned."""
    lists, counts = ("losses", "norms", "dropped"), ("found", "skipped")
    return (
        isinstance(x, dict)
        and all(isinstance(x.get(key), list) and all(map(is_number, x[key])) for key in lists)
        and all(is_count(x.get(key)) for key in counts)
    )


def is_best(x: Any) -> bool:
    """Whether x can be what Best.state() returned."""
    return (
        isinstance(x, dict)
        and (x.get("loss") is None or is_number(x["loss"]))
        and is_count(x.get("step"))
        and is_count(x.get("since"))
    )


# What a run counts (Meter.state) → whether a value can be that
METER: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("tokens_seen", "steps"), is_count),
    **dict.fromkeys(("seconds", "spent", "waited", "loss"), is_number),
    "counts": are_counts,
}
CUDA_BYTES = 16  # of the state of a GPU's generator: its seed and its offset
TO_RESUME = {"state_dict", "optimizer_states", "meter", "random", "steps_done"}


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


def tidy(folder: Path, step: int, keep: int, best_step: int = 0) -> Removal:
    """Point last.ckpt at the checkpoint after `step`, and best.ckpt at that after `best_step`, if
    it is there; begin to delete all but these and the newest `keep`, and what killed processes
    left. Only whole checkpoints up to `step` count, so none is deleted for one that is not.
    """
    saved, best = (run_folder.checkpoint_path(folder, n) for n in (step, best_step))
    there = [x for x in run_folder.checkpoints(folder) if by_step(x) <= by_step(saved)]
    paths = [path for path in there if is_complete(path)]
    _link("last.ckpt", saved)
    if best in paths:
        _link("best.ckpt", best)
    else:
        files.remove(folder / "checkpoints" / "best.ckpt")
    leftovers = list((folder / "checkpoints").glob(".step-*.ckpt*"))
    return Removal([path for path in paths[:-keep] if path != best], leftovers)


def is_complete(path: Path) -> bool:
    """Return True if all files of the checkpoint at `path` are there and of the right size."""
    try:
        return checkpoint_index.verify(path, reads=False) is None
    except ValueError:
        return False


def _link(name: str, target: Path) -> None:
    path = target.with_name(name)
    if not path.is_symlink():  # a copy, from a program that follows links
        files.remove(path)
    with files.atomic(path) as link:
        link.symlink_to(target.name)


def read(path: Path, parts: Collection[str] = ("state_dict",)) -> dict[str, Any]:
    """Return the checkpoint at `path`, with `Rows` for tensors.

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


def saving(
    path: Path,
    about: Mapping[str, Any],
    state: Mapping[str, Any],
    weights: Mapping[str, Sharded],
    optimizer: Mapping[str, Any] | None = None,
    trained: Sequence[str] = (),
    writers: Writers = ALONE,
) -> Saving:
    """A checkpoint to write: what this rank has of `weights`, by name, and of the `optimizer` that
    trains those called `trained`, in its order.

    `about` comes from `describe`, `state` holds random_state() as "random" and plain values.
    """
    tensors = dict(weights)
    scalars: dict[str, dict[str, float]] = {}
    optimizer = optimizer or {"state": {}, "param_groups": []}
    for number, values in optimizer["state"].items():
        of = weights[trained[number]]
        for key, value in values.items():
            if value.ndim:
                shape = torch.Size([of.shape[0], *value.shape[1:]])
                tensors[f"optimizer.{number}.{key}"] = Sharded(value, shape, of.rows_of)
            else:
                scalars.setdefault(str(number), {})[key] = float(value)
    plain = {
        "longctx": dict(about),
        **state,
        "random": _plain_random(state["random"]),
        "param_groups": optimizer["param_groups"],
        "optimizer_scalars": scalars,
    }
    return Saving(path, plain, tensors, writers)


def opened(path: Path) -> dict[str, Any]:
    """Return the content of the checkpoint at `path`, whichever parts it has, with `Rows` for
    tensors; ValueError if no run wrote it.
    """
    try:
        content = checkpoint_folder.read(path)
    except ValueError as error:
        raise _not_whole(path, str(error)) from error
    if content["format"] != checkpoint_index.FORMAT:
        raise ValueError(
            f"{path}: a folder of format {content['format']}, this version reads "
            f"{checkpoint_index.FORMAT}"
        )
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
    except (
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
    ) as error:
        raise ValueError(f"{path}: not a whole checkpoint ({error})") from error
    if not isinstance(content.get("longctx"), dict):
        raise ValueError(
            f"{path}: a checkpoint of another program; longctx reads those that train.py wrote"
        )
    optimizer = {"state": states, "param_groups": groups}
    return content | {"state_dict": weights, "optimizer_states": [optimizer]}


def verify(path: Path) -> None:
    """Raise Damaged, with a remedy, where the checkpoint at `path` is not what was written."""
    try:
        damaged = checkpoint_index.verify(path)
    except ValueError as error:
        raise _not_whole(path, str(error)) from error
    if damaged is not None:
        raise Damaged(path, f"damaged, {damaged} is not what was written")


def check_finite(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Raise Damaged where a weight or a state of the optimizer is NaN or infinite."""
    name = tensor_checks.not_finite(checkpoint["state_dict"] | _states(checkpoint))
    if name is not None:
        raise Damaged(path, f"{name} is not finite")


def check_states(
    path: Path,
    checkpoint: Mapping[str, Any],
    expected: Sequence[tuple[torch.Size, Collection[str] | None]],
) -> None:
    """Raise ValueError unless the optimizer's state in the checkpoint at `path` is that of the
    weights that it trains, by number the shape and the names of the states of each; None: any.

    A state is a count of steps, or a tensor of the shape of its weight.
    """
    saved = checkpoint["optimizer_states"]
    try:
        ((state, groups),) = ((x["state"], x["param_groups"]) for x in saved)
        numbers = [number for group in groups for number in group["params"]]
        names = {number: set(values) for number, values in state.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: its optimizer_states hold no state of an optimizer") from error
    of_run = {n: set(names) for n, (_, names) in enumerate(expected) if names is not None}
    known = range(len(expected))
    if numbers != list(known) or not names.keys() <= set(known) or (of_run and names != of_run):
        raise ValueError(
            f"{path}: its optimizer_states are not those of the optimizer of the run, which trains "
            f"{len(expected)} weights"
        )
    steps_done = checkpoint["steps_done"]
    for number, values in state.items():
        for key, x in values.items():
            shape, names_of_run = expected[number]
            if key == "step" or (names_of_run is None and getattr(x, "ndim", None) == 0):
                shape = torch.Size()
            wrong = tensor_checks.flaw(x, shape)
            if wrong is None and key == "step" and not 1 <= float(x) <= steps_done:
                wrong = f"{float(x):g}, after {steps_done} steps"
            if wrong:
                raise ValueError(
                    f"{path}: its optimizer_states are not those of the model: {key} of weight "
                    f"{number} is {wrong}"
                )


def _states(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the optimizer, by a name for messages."""
    (saved,) = checkpoint["optimizer_states"]
    return {
        f"{key} of the optimizer for weight {number}": x
        for number, values in saved["state"].items()
        for key, x in values.items()
    }


def check_plain(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Raise ValueError for the first plain part of the checkpoint at `path` that no run can have
    written.
    """
    steps = checkpoint["steps_done"]
    if not is_count(steps) or not steps:
        raise ValueError(f"{path}: steps_done={_short(steps)}: not a number of steps")
    meter = checkpoint["meter"]
    if not isinstance(meter, dict):
        raise ValueError(f"{path}: meter={_short(meter)}: not the counters of a run")
    for key, may_be in METER.items():
        if not may_be(meter.get(key)):
            raise ValueError(f"{path}: meter.{key}={_short(meter.get(key))}: not what a run counts")
    try:
        _try_random_state(checkpoint["random"])
    except Exception as error:  # of torch, numpy and Python, each of its own kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: random: not the state of random number generators ({reason})"
        ) from error
    best, spikes = checkpoint.get("best"), meter.get("spikes")  # older checkpoints have none
    if best is not None and not is_best(best):
        raise ValueError(f"{path}: best={_short(best)}: not what a run writes")
    if spikes is not None and not are_spikes(spikes):
        raise ValueError(f"{path}: meter.spikes={_short(spikes)}: not what a run writes")
    config = checkpoint["longctx"]["config"]
    if not isinstance(config, dict):
        raise ValueError(f"{path}: config={_short(config)}: not the configuration of a run")


def _try_random_state(state: dict[str, Any]) -> None:
    """Set generators that nobody uses to `state`; they raise whatever they do not take."""
    torch.Generator().set_state(state["torch"].clone())
    for x in state["cuda"]:
        if x.dtype != torch.uint8 or x.shape != (CUDA_BYTES,):
            raise ValueError(f"{x.dtype} {list(x.shape)} for a GPU")
    version, internal, gauss = state["python"]
    random.Random().setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    if not 0 <= position <= len(keys) or has_gauss not in (0, 1):  # numpy does not look
        raise ValueError(f"position {position} of {len(keys)}")
    values = np.array(keys, dtype=np.uint32)
    np.random.RandomState().set_state((kind, values, position, has_gauss, gauss))


def _short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def _not_whole(path: Path, why: str) -> Damaged:
    ours = path.resolve().match("checkpoints/step-*.ckpt")
    return Damaged(path, f"not a checkpoint, or not a whole one: {why}", has_remedy=ours)


def _remedy(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    target = path.resolve()  # last.ckpt is a link
    saved = run_folder.checkpoints(target.parent.parent)
    if older := [path for path in saved if by_step(path) < by_step(target)]:
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
    kind, keys, *position = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *position))
