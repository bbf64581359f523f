"""Folders that are built once, found again by a fingerprint, and never seen half-built.

A build writes to `KEY.partial` under a file lock and renames it to `KEY` when it is complete, so a
killed build leaves only what the next one removes, and of two runs that start together one builds
and the other waits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


def fingerprint(value: Any) -> str:
    """32 hex digits of the SHA-256 of a JSON-able value, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def cached(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, calling `build(empty folder)` first unless an earlier call completed it.

    `folder` then holds what `build` wrote and `complete.json` with the size of every file; a folder
    whose files no longer have these sizes is built again. Raises OSError, one line, if the cache
    cannot be written.
    """
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f"{folder.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"data: waiting for another run that is building {folder}", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        if not _is_complete(folder):
            _build(folder, build)
    finally:
        lock.release()
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.parent / f"{folder.name}.partial"
    try:
        _remove(partial)
        _remove(folder)
        partial.mkdir()
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        build(partial)
        sizes = {
            str(file.relative_to(partial)): file.stat().st_size
            for file in partial.rglob("*")
            if file.is_file()
        }
        (partial / "complete.json").write_text(json.dumps(sizes))
        os.replace(partial, folder)
    except OSError as error:
        in_cache = error.filename is None or str(error.filename).startswith(str(partial))
        raise (_unwritable(folder, error) if error.errno and in_cache else error) from error
    finally:
        _remove(partial)


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / "complete.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _unwritable(folder: Path, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    return OSError(
        f"data.cache: cannot write {folder} ({reason}); give another folder with data.cache=FOLDER"
    )
