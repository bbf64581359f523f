"""Run folders: runs/<name>/ with config.yaml, metrics.jsonl, tokenizer.json, checkpoints/ and
wandb/. Torch-free.

Training, evaluation and reports read a run through here; metrics.jsonl is in `metrics_file`. A
folder is claimed by an exclusive mkdir, so two runs started together never share one. It is locked
while it trains. Files are replaced atomically.
"""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from longctx import files, untrusted
from longctx.config.fields import declared_as, shown
from longctx.config.train_config import TrainConfig
from longctx.runs import checkpoint_index, metrics_file

LOCK, CONFIG = "kernel.lock.json", "config.yaml"


def stem(choices: dict[str, str], seq_len: int, changed: dict[str, str]) -> str:
    """Return the beginning of a new folder's name, such as `tiny-flash-16k-lr0.003`: what differs
    from the defaults.
    """
    length = f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)
    shape = {key for key in changed if key.startswith("model.")}
    is_own = len(shape) > 3  # so many keys of a model would fill the name
    parts = ["own" if is_own else choices["model"], choices["attention"], length]
    if choices["data"] != "embedded":
        parts += [choices["data"]]
    for key, value in changed.items():
        is_told = key in ("model", "attention", "data")  # above
        is_left_out = is_told or value == "auto" or (is_own and key in shape)
        if not is_left_out and declared_as(TrainConfig, key).names:
            parts += [key.split(".")[-1].replace("_", "") + value]
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-")[:80].rstrip("-.")


def check_free(root: Path, name: str | None) -> None:
    """Raise ValueError if the run `name` exists already."""
    if name is not None and (path := root / name).exists():
        remedy = f"continue it with resume={path}" if checkpoints(path) else "delete it if unused"
        remedy = "wait for the process that trains it" if is_training(path) else remedy
        raise ValueError(f"name={name}: {path} exists already; {remedy}, or choose another name")


def create(root: Path, name: str | None, beginning: str) -> Path:
    """Make the folder of a new run, exclusively: `name`, or else `beginning` and the first free
    number.
    """
    root.mkdir(parents=True, exist_ok=True)
    if name is not None:
        check_free(root, name)
        (root / name).mkdir()
        return root / name
    for number in itertools.count(1):
        folder = root / f"{beginning}-{number:03d}"
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def fill(
    folder: Path, texts: dict[str, str], settings: dict[str, Any], lock: dict[str, Any] | None
) -> None:
    """Write the files `texts` of a new run, and `texts_of` it; a failure removes the folder, which
    would look like a run.
    """
    try:
        (folder / "checkpoints").mkdir()
        for file, text in (texts | texts_of(settings, lock)).items():
            files.write_text(folder / file, text)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def go_back(checkpoint: Path, damaged: Mapping[Path, str], texts: Mapping[str, str]) -> None:
    """Take the folder of a resumed run back to its `checkpoint`: remove what killed processes
    wrote half, drop later metrics, set newer `damaged` ones aside, write `texts_of` the run.
    """
    folder = checkpoint.parent.parent
    # First, since the disk may be full of them
    for path in (folder, checkpoint.parent):
        files.remove_partial(path)
    metrics_file.drop_after(folder, step_of(checkpoint))
    for path, damage in damaged.items():
        aside = path.with_name(f"{path.name}.damaged")
        files.remove(aside)
        path.rename(aside)
        continues = f"set aside as {aside.name}, the run continues from {checkpoint}"
        print(f"{path}: {damage}; {continues}", file=sys.stderr)
    if LOCK not in texts:
        (folder / LOCK).unlink(missing_ok=True)
    for file, text in texts.items():
        files.write_text(folder / file, text)


def texts_of(settings: dict[str, Any], lock: dict[str, Any] | None) -> dict[str, str]:
    """Return the text of kernel.lock.json, if there is a `lock`, and of config.yaml."""
    locks = {} if lock is None else {LOCK: json.dumps(lock, indent=1) + "\n"}
    text = yaml.safe_dump(settings | {"resume": None}, sort_keys=False, width=120)
    return locks | {CONFIG: text}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` for this process; ValueError if another one trains it."""
    # It is a flock of the folder itself: the kernel releases it however the process ends, it leaves
    # no file behind, and `is_training` can see it without the right to write.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise ValueError(f"{folder}: another process is training this run") from error
        problem = f"its file system has no locks ({error.strerror}); choose another with runs="
        raise OSError(f"{folder}: {problem}") from error
    _locks.add(descriptor)
    try:
        yield
    finally:
        _locks.discard(descriptor)
        os.close(descriptor)


def is_training(folder: Path) -> bool:
    """Return True if a process trains the run now; FileNotFoundError if the folder is gone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # else a file system without locks
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


_locks: set[int] = set()
# A data worker that outlives a killed run must not keep its lock
os.register_at_fork(after_in_child=lambda: list(map(os.close, _locks)))


def find(path: str) -> Path:
    """Return the folder of the run at `path`; ValueError if it cannot be resumed, OSError if it
    cannot be written.
    """
    folder = Path(path).expanduser()
    # The defaults of a config.yaml that was cut would name other documents
    read_config(folder, ("devices", "batch_size", "accumulate"), f"resume={path}")
    if not checkpoints(folder):
        with locked(folder):  # another process may train the run, and write one yet
            problem = "the run has no checkpoint, a step-N.ckpt that holds step N; start it anew"
            raise ValueError(f"resume={path}: {problem}")
    files.check_writable(folder)
    files.check_writable(folder / "checkpoints")
    return folder


def is_hugging_face(path: Path) -> bool:
    """Return True if `path` has a config.json, and is neither a run nor an adapter."""
    adapter = (path / "adapter_config.json").exists() and not any(path.glob("model*.safetensors"))
    # Also a link that leads nowhere, or no file: its reader says so
    has_settings = os.path.lexists(path / "config.json")
    return has_settings and not (path / "config.yaml").exists() and not adapter


def is_run(path: Path) -> bool:
    """Return True if `path` is a run, or one of its checkpoints."""
    return path.suffix == ".ckpt" or (path / "config.yaml").exists()


def checkpoint_of(path: Path, key: str = "checkpoint") -> Path:
    """Return the checkpoint that `path`, given as `key`, names: itself, or the newest one of a run.

    Raises ValueError if there is none.
    """
    if path.exists() and path.suffix == ".ckpt":
        return path
    if path.is_dir() and (saved := checkpoints(path)):
        return saved[-1]
    if not path.exists():
        why = f"no such file or folder; {closest_to(path) or 'give a run or a model'}"
    elif (path / "adapter_config.json").exists():
        why = "an adapter, which lacks the weights it adds to; give the run, or a full export"
    elif is_hugging_face(path):
        why = "a Hugging Face folder already; give a run"
    elif (path / "config.yaml").exists():
        why = "the run has no checkpoint yet; train it further"
    else:
        why = "neither a run, such as runs/NAME, nor a Hugging Face folder with config.json"
    raise ValueError(f"{key}={path}: {why}")


def closest_to(path: Path) -> str:
    """Return the run next to `path` that has nearly its name, as a question; "" if none has."""
    runs = sorted(x.parent.name for x in path.absolute().parent.glob("*/config.yaml"))
    close = difflib.get_close_matches(path.name, runs, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def check_resumable(folder: Path, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError for the first key of `given` that a resume needs as it was `saved`."""
    for key, value in given.items():
        is_same = key in saved and (saved[key] == value or shown(saved[key]) == shown(value))
        if not (is_same or declared_as(TrainConfig, key).resume):
            why = f"cannot change when {folder} is resumed, which keeps its config.yaml"
            raise ValueError(f"{key} {why}; leave it out, or start a new run")


def check_unedited(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError if `now`, read from config.yaml, computes something else than the config
    `saved` in a checkpoint.
    """
    before, after = flat(saved), flat(now)
    is_other_step = sequences_per_step(before) != sequences_per_step(after)
    of_step = {"batch_size", "accumulate"} if is_other_step else set()
    for key in sorted(before.keys() | after.keys()):
        declared = declared_as(TrainConfig, key)
        is_free = declared.resume or not declared.compared or key == "init"
        # The data has its fingerprint
        if key not in of_step and (is_free or key.startswith("data.")):
            continue
        is_known = declared.is_open or (key in before and key in after)
        if is_known and before.get(key) != after.get(key):
            why = f"the run began with {before.get(key)}; it cannot change when it is resumed"
            raise ValueError(f"{folder / CONFIG}: {key}={after.get(key)}, but {why}; put it back")


def sequences_per_step(settings: dict[str, Any]) -> int:
    """Return the sequences of a step over all devices of a run with these settings, as `flat`."""
    groups = settings["devices"] // settings.get("context.degree", 1)
    return int(settings["batch_size"] * settings["accumulate"] * groups)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, damaged ones too. A folder without a JSON, or
    with the JSON of another step than its name, is none: somebody copied, made or deleted it.
    """
    paths = (folder / "checkpoints").glob("step-*.ckpt")
    return sorted((path for path in paths if _is_checkpoint(path)), key=step_of)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def _is_checkpoint(path: Path) -> bool:
    is_empty = not path.is_file() and not os.path.lexists(path / checkpoint_index.INDEX)
    if is_empty or not re.fullmatch(r"step-\d{8,}\.ckpt", path.name):
        return False
    try:
        steps = checkpoint_index.read(path).get("steps_done")
        return steps is None or path.name == f"step-{steps:08d}.ckpt"
    except (ValueError, TypeError):  # damaged, which its reader reports
        return True


def plain(config: Any) -> dict[str, Any]:
    """Return a configuration as dictionaries, lists, strings, numbers."""
    values = config if isinstance(config, dict) else dataclasses.asdict(config)
    return dict(json.loads(json.dumps(values)))


def read_config(folder: Path, needed: Collection[str] = (), given: str = "") -> dict[str, Any]:
    """Return the values of config.yaml, nested keys joined by dots.

    Raises FileNotFoundError if there is no such folder, ValueError if it is no run's or lacks a
    key in `needed`. A message about the folder begins with `given`, or its path.
    """
    if not folder.is_dir():
        problem = "a file" if folder.exists() else "no such folder"
        remedy = closest_to(folder) or "give the folder of a run, such as runs/NAME"
        raise FileNotFoundError(f"{given or folder}: {problem}; {remedy}")
    path = folder / "config.yaml"
    if not path.is_file():
        remedy = "it has no config.yaml; give runs/NAME"
        if not given and any(folder.glob("*/config.yaml")):  # resume= takes one
            remedy = f"it holds runs, so give {folder}/*/"
        raise ValueError(f"{given or folder}: not the folder of a run, {remedy}")
    config = flat(read_keys(path, folder))
    if missing := [key for key in needed if key not in config]:
        why = "though every run writes it: the file was cut; put a copy of it back"
        raise ValueError(f"{path}: no {', '.join(missing)}, {why}")
    return config


def read_keys(path: Path, within: Path | None = None) -> dict[str, Any]:
    """Return the nested values of the file of keys at `path`, which really is in `within`; OSError
    or ValueError if it has none.
    """
    try:
        values = untrusted.load_yaml(path, within)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; give one with key: value lines") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{path}: no configuration; it should hold key: value lines")
    return values


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"model": {"layers": 2}} as {"model.layers": 2}; ValueError for a key given twice."""
    result: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        inner = flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
        for twice in result.keys() & inner.keys():
            raise ValueError(f"{twice} is given twice; leave one out")
        result |= inner
    return result
