"""Run folders: runs/<name>/ with config.yaml, metrics.jsonl, tokenizer.json, checkpoints/ and
wandb/. Torch-free.

A folder is claimed by an exclusive mkdir, so two runs started together never share one, and is
locked while it trains. Files are replaced whole.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from longctx import files

# What resume= may change: where, how long and how closely watched the run is. A new length changes
# the learning rate of the steps to come; nothing else changes what is computed.
RESUMABLE = {
    *(
        "max_steps",
        "max_tokens",
        "val_every",
        "val_rows",
        "checkpoint_every",
        "keep_checkpoints",
        "log_every",
    ),
    *("workers", "device", "compile", "kernel.lock"),
    *(f"passkey.{key}" for key in ("enabled", "lengths", "depths", "samples", "kinds")),
    *(
        f"wandb.{key}"
        for key in ("project", "entity", "mode", "group", "job_type", "tags", "notes", "artifacts")
    ),
}
# Groups of keys that decide what is computed; data has its fingerprint.
DECISIVE = {"attention", "model", "lora", "rope", "optimizer"}
NOT_IN_NAMES = {
    "model",
    "attention",
    "seq_len",
    "data",
    "strategy",
    "name",
    "runs",
    "device",
    "init",
    *RESUMABLE,
}
CHECKPOINT_NAME = re.compile(r"step-(\d+)\.ckpt")


def stem(choices: dict[str, str], seq_len: int, changed: dict[str, str]) -> str:
    """What differs from the defaults as the beginning of a folder's name, such as
    `tiny-flash-16k-lr0.003`.
    """
    length = f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)
    parts = [choices["model"], choices["attention"], length]
    if choices["data"] != "embedded":
        parts.append(choices["data"])
    for key, value in changed.items():
        if key not in NOT_IN_NAMES and not key.startswith("data."):
            parts.append(key.split(".")[-1].replace("_", "") + value)
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-")[:80].rstrip("-.")


def check_root(root: Path) -> None:
    """Raise OSError unless a folder can be made in `root`, or in what `root` will be made in."""
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".longctx-", dir=existing))
    except OSError as error:
        raise OSError(
            f"runs={root}: no folder can be made in {existing}: {error.strerror}; choose another"
        ) from error


def check_free(root: Path, name: str | None) -> None:
    """Raise ValueError if the run `name` exists already."""
    if name is not None and (root / name).exists():
        raise ValueError(
            f"name={name}: {root / name} exists already; continue it with resume={root / name}, or choose another"
        )


def create(root: Path, name: str | None, beginning: str) -> Path:
    """Make the folder of a new run, exclusively: `name`, or `beginning` and the first free number."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        if name is not None:
            check_free(root, name)
            (root / name).mkdir()
            return root / name
        number = 1
        while True:
            folder = root / f"{beginning}-{number:03d}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise OSError(
            f"runs={root}: no folder can be made there: {error.strerror or error}"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; ValueError if another one trains it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ValueError(f"{folder}: another process is training this run") from error
    _locks.add(descriptor)
    try:
        yield
    finally:
        _locks.discard(descriptor)
        os.close(descriptor)


def _leave_locks_to_the_parent() -> None:
    # A data worker that outlives a killed run must not keep its lock.
    for descriptor in _locks:
        os.close(descriptor)


_locks: set[int] = set()
os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


def find(path: str) -> Path:
    """The folder of the run at `path`; raises ValueError if there is none, or none with a
    checkpoint.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"resume={path}: no such folder; give the folder of a run, such as runs/NAME"
        )
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"resume={path}: not the folder of a run, it has no config.yaml")
    if not checkpoints(folder):
        with locked(folder):  # else it is still on its way to one
            pass
        raise ValueError(
            f"resume={path}: the run was stopped before its first checkpoint; start it anew"
        )
    return folder


def check_resumable(folder: Path, words: Iterable[str]) -> None:
    """Raise ValueError naming the first of the key=value `words` that a resumed run must not
    change.
    """
    for key in (word.partition("=")[0].lstrip("+") for word in words):
        if key not in RESUMABLE:
            raise ValueError(
                f"{key} cannot change when {folder} is resumed; it keeps its config.yaml. Start a new run"
            )


def check_unedited(folder: Path, saved: dict[str, Any], config: Any) -> None:
    """Raise ValueError where `config`, read from config.yaml, computes something else than the one
    `saved` in a checkpoint.
    """
    now = plain(config)
    for name in sorted(saved.keys() & now.keys() - {"name", "runs", "resume", "init", *RESUMABLE}):
        was, is_now = saved[name], now[name]
        if not isinstance(was, dict):
            was, is_now, prefix = {name: was}, {name: is_now}, ""
        elif name in DECISIVE:
            prefix = f"{name}."
        else:
            continue
        for key in (key for key in was if key in is_now):
            if was[key] != is_now[key]:
                raise ValueError(
                    f"{folder / 'config.yaml'}: {prefix}{key}={is_now[key]}, where the run began with {was[key]}; it cannot "
                    "change when the run is resumed, so put it back"
                )


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = (folder / "checkpoints").glob("step-*.ckpt")
    return sorted(
        (path for path in found if CHECKPOINT_NAME.fullmatch(path.name)), key=files.by_step
    )


def write_config(folder: Path, config: Any) -> None:
    """Write the resolved configuration to config.yaml."""
    files.write_text(
        folder / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False, width=120)
    )


def plain(config: Any) -> dict[str, Any]:
    """A configuration as dictionaries, lists, strings, numbers."""
    result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return result


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a line that is none, such as a last one cut off by a kill, is left
    out.
    """
    rows = []
    path = folder / "metrics.jsonl"
    for line in (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    ):
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and type(row.get("step")) is int:
                rows.append(row)
    return rows


def drop_metrics_after(folder: Path, step: int) -> None:
    """Remove the rows of steps past `step`, which a resumed run computes again."""
    kept = [row for row in read_metrics(folder) if row["step"] <= step]
    files.write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
