"""The files of a checkpoint: a JSON lists them with their sizes and checksums. Torch-free, so that
a command can look at a run before it loads torch.
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from longctx import files, untrusted

FORMAT = 3
INDEX = "checkpoint.json"
INDEX_SIZE = 128 * untrusted.MIB  # of a model of 1,000 weights on 1,024 ranks
AT_ONCE = 4  # files that are written, or read, at one time
CHUNK = 1 << 24  # bytes that are read, or written, at one time


class Damaged(ValueError):
    """Raised for a checkpoint that differs from the run's own; `what` is the difference."""

    def __init__(self, path: Path, what: str) -> None:
        self.what = what
        super().__init__(f"{path}: {what}; copy it here again, or delete it to take an older one")


def read(path: Path) -> dict[str, Any]:
    """Return the content of the JSON of the checkpoint at `path`; raise Damaged unless it is whole
    and lists every file that holds slices, ValueError if there is none.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such checkpoint; a run that trains deletes old ones; retry")
    if path.is_file():
        raise Damaged(path, "not a whole checkpoint, or written by an older longctx")
    try:
        written = untrusted.read_json(path / INDEX, INDEX_SIZE, within=path)
        content: dict[str, Any] = written["content"]
        if zlib.crc32(json.dumps(content).encode()) != written["crc32"]:
            raise ValueError("its checksum differs")
        slices = [part for tensor in content["tensors"].values() for part in tensor["rows"]]
        # `verify` looks at listed files only, so no other may hold slices
        if unlisted := {file for file, _, _ in slices} - content["files"].keys():
            raise ValueError(f"{unlisted.pop()} is not listed")
    except Exception as error:  # anybody can write such a file
        raise Damaged(path, f"not a whole checkpoint: {INDEX} cannot be read ({error})") from error
    return content


def verify(path: Path, reads: bool = True) -> None:
    """Raise Damaged unless the files of the checkpoint at `path` have the sizes and checksums of
    its JSON. Without `reads` only sizes are compared.
    """
    listed = read(path)["files"]

    def matches(name: str) -> bool:
        # Anybody can write the JSON
        with suppress(Exception), untrusted.open_file(path / name, within=path) as file:
            # The size first: a sparse file of any size takes no space, and hours to read
            if os.fstat(file.fileno()).st_size != listed[name]["bytes"]:
                return False
            crc32 = 0
            while reads and (chunk := file.read(CHUNK)):
                crc32 = zlib.crc32(chunk, crc32)
            return not reads or bool(crc32 == listed[name]["crc32"])
        return False

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, is_same in zip(listed, pool.map(matches, listed), strict=True):
            if not is_same:
                read(path)  # its run may have deleted it meanwhile
                raise Damaged(path, f"damaged, the checksum of {name} differs")


def set_aside(path: Path) -> Path:
    """Hide a checkpoint before it is deleted, so that nobody reads half; return its new path."""
    hidden = path.with_name(f".{path.name}.removed")
    files.remove(hidden)
    os.rename(path, hidden)
    return hidden
