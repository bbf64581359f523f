"""Folders that are built once, found again by a fingerprint, and never seen half-built.

A build writes to `KEY.partial` under a file lock and renames it to `KEY` when it is complete, so a
killed build leaves only what the next one removes, and of two runs that start together one builds
and the other waits. Every file's hash is written when it is built and checked whenever it is
opened: what changed on the disk since is built again, and that is said.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from longctx import files, untrusted

if TYPE_CHECKING:
    import numpy as np

Opened = TypeVar("Opened")

_COMPLETE = "complete.json"
_PIECE = 1 << 24  # bytes that a thread hashes at one time


class Damaged(ValueError):
    """A folder of the cache that is not what was built."""


def fingerprint(value: Any) -> str:
    """32 hex digits of the SHA-256 of a JSON-able value, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def cached(folder: Path, build: Callable[[Path], None], opened: Callable[[Path], Opened]) -> Opened:
    """Return `opened(folder)`, calling `build(empty folder)` first unless an earlier call completed
    it.

    `folder` then holds what `build` wrote and `complete.json` with the size and hash of every file.
    A folder whose files are others, or that `opened` raises for, is built again; a line on stderr
    says so. Raises OSError, one line, if the cache cannot be written.
    """
    if folder.exists():
        try:
            return _checked(folder, opened)
        except Damaged:
            pass  # looked at again under the lock: another run may have built it meanwhile
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
        if os.path.lexists(folder):
            try:
                return _checked(folder, opened)
            except Damaged as error:
                print(f"data: {folder} is built again: {error}", file=sys.stderr)
        _build(folder, build)
        return opened(folder)
    finally:
        lock.release()


def _checked(folder: Path, opened: Callable[[Path], Opened]) -> Opened:
    """`opened(folder)`; Damaged, one line, unless its files are those that were built."""
    try:
        built = untrusted.read_json(folder / _COMPLETE, within=folder)
        if not isinstance(built, dict) or not built:
            raise Damaged(f"{_COMPLETE} names no files")
        for name, wanted in built.items():
            if _described(folder / name, folder) != wanted:
                raise Damaged(f"{name} is not what was written")
        return opened(folder)
    except Damaged:
        raise
    except Exception as error:  # of the readers of a file that may hold anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Damaged(reason) from error


def _described(file: Path, folder: Path) -> dict[str, Any]:
    """The size of a file and the SHA-256 of the SHA-256 of its pieces, hashed by all cores."""
    with untrusted.open_file(file, within=folder) as opened:
        size = os.fstat(opened.fileno()).st_size

        def piece(start: int) -> bytes:
            return hashlib.sha256(os.pread(opened.fileno(), _PIECE, start)).digest()

        digest = hashlib.sha256()
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for one in threads.map(piece, range(0, size, _PIECE)):
                digest.update(one)
    return {"bytes": size, "sha256": digest.hexdigest()}


def read_arrays(file: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read `names` of what np.savez wrote; ValueError for a compressed file, which could hold any
    number of bytes.
    """
    import numpy as np  # here, since a configuration is checked without it

    with untrusted.open_file(file) as opened:
        with zipfile.ZipFile(opened) as archive:
            if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
                raise ValueError(f"{file}: compressed, which these files never are")
        opened.seek(0)
        with np.load(opened) as arrays:
            return {name: arrays[name] for name in names}


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.parent / f"{folder.name}.partial"
    try:
        files.remove(partial)
        files.remove(folder)
        partial.mkdir()
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        build(partial)
        built = {
            str(file.relative_to(partial)): _described(file, partial)
            for file in sorted(partial.rglob("*"))
            if file.is_file()
        }
        (partial / _COMPLETE).write_text(json.dumps(built))
        os.replace(partial, folder)
    except OSError as error:
        in_cache = error.filename is None or str(error.filename).startswith(str(partial))
        raise (_unwritable(folder, error) if error.errno and in_cache else error) from error
    finally:
        files.remove(partial)


def _unwritable(folder: Path, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    return OSError(
        f"data.cache: cannot write {folder} ({reason}); give another folder with data.cache=FOLDER"
    )
