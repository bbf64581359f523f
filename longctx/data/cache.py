"""Folders that are built once, found again by a fingerprint, and never seen half-built.

A build writes to `KEY.partial` under a file lock and renames it to `KEY` when it is complete. So
the next build removes the files of a killed one, and of two runs that start together one builds and
the other waits. The hash of every file is written when it is built and checked whenever the folder
is opened: a folder that has changed since is built again, and a line tells the user.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from longctx import files, untrusted
from longctx.config.data_config import DataConfig

_COMPLETE = "complete.json"
_PIECE = 1 << 24  # bytes that are hashed at one time


def cache_folder(config: DataConfig) -> Path:
    """Return the folder for everything built from documents, without creating it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    own = config.cache or os.environ.get("LONGCTX_CACHE") or caches / "longctx"
    return Path(own).expanduser()


def fingerprint(value: Any) -> str:
    """Return 32 hex digits of the SHA-256 of a JSON-able value, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def cached(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, after `build(empty folder)` unless an earlier call completed it.

    `folder` then holds the files that `build` wrote, and `complete.json` with the size and hash of
    each. Raises OSError if the cache cannot be written.
    """
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        # Another run may have built it before this one got the lock.
        if not is_whole(folder):
            if os.path.lexists(folder):
                print(f"data: {folder} has changed, so it is built again", file=sys.stderr)
            _build(folder, build)
    return folder


def _locked(folder: Path) -> AbstractContextManager[Any]:
    """Wait until this run alone builds `folder`; leaving the context lets others."""
    lock = FileLock(folder.parent / f"{folder.name}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"data: waiting for another run that is building {folder}", file=sys.stderr)
    return lock.acquire()


def is_whole(folder: Path) -> bool:
    """Return True if the files of `folder` are as they were built."""
    try:
        built = untrusted.read_json(folder / _COMPLETE)
        return bool(built) and all(
            described(folder / name) == wanted for name, wanted in built.items()
        )
    except (OSError, ValueError, AttributeError):  # AttributeError: the JSON of something else
        return False


def described(file: Path) -> dict[str, Any]:
    """Return the size of a file and the SHA-256 of the SHA-256 of its pieces."""
    with untrusted.open_file(file) as opened:
        pieces = iter(lambda: opened.read(_PIECE), b"")
        digests = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
        return {"bytes": opened.tell(), "sha256": hashlib.sha256(digests).hexdigest()}


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.parent / f"{folder.name}.partial"
    # A killed build left the first, a changed file the second.
    files.remove(partial)
    files.remove(folder)
    partial.mkdir()
    try:
        build(partial)
        built = {
            str(file.relative_to(partial)): described(file)
            for file in sorted(partial.rglob("*"))
            if file.is_file()
        }
        (partial / _COMPLETE).write_text(json.dumps(built))
        os.replace(partial, folder)
    except OSError as error:
        if error.errno:  # a full disk has no name
            error.filename = error.filename or str(folder)
        raise
    finally:
        files.remove(partial)
