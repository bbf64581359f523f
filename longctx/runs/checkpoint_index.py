"""The JSON of a checkpoint, which says what its files are: read, and held against them.

Needs no torch, so that a command can look before it loads that.
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from longctx import untrusted

FORMAT = 3
INDEX = "checkpoint.json"
INDEX_SIZE = 128 * untrusted.MIB  # of a model of 1,000 weights on 1,024 ranks
AT_ONCE = 4  # files that are written, or read, at one time
CHUNK = 1 << 24  # bytes that a checksum reads at one time


def read(path: Path) -> dict[str, Any]:
    """What the JSON of the checkpoint in the folder `path` says; ValueError, which says why, where
    that is not what was written.
    """
    if path.is_file():
        raise ValueError("a file, as longctx wrote checkpoints before 1.0; go on with that version")
    try:
        written = untrusted.read_json(path / INDEX, INDEX_SIZE, within=path)
        content: dict[str, Any] = written["content"]
        if zlib.crc32(json.dumps(content).encode()) != written["crc32"]:
            raise ValueError("its checksum differs")
        if not sum(file["bytes"] for file in content["files"].values()):
            raise ValueError("it names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{INDEX} is not what runs write ({error})") from error
    return content


def verify(path: Path, limit: float = float("inf"), reads: bool = True) -> str | None:
    """Return the first file of the checkpoint at `path` that is not what was written, None if all
    are. Only listed, regular files of the listed size are read; without `reads` none is.

    Raises ValueError as `read`, or if the files have more than `limit` bytes in all.
    """
    files = read(path)["files"]
    if sum(written["bytes"] for written in files.values()) > limit:
        raise ValueError(f"{path}: more than {limit:,.0f} bytes")

    def is_whole(name: str) -> bool:
        try:
            with untrusted.open_file(path / name, within=path) as file:
                # The size first: a sparse file of any size takes no space, and hours to read
                has_size = os.fstat(file.fileno()).st_size == files[name]["bytes"]
                return has_size and (not reads or checksum(file) == files[name]["crc32"])
        except (OSError, ValueError):
            return False

    with ThreadPoolExecutor(AT_ONCE) as pool:
        intact = list(pool.map(is_whole, files))
    return next((name for name, good in zip(files, intact, strict=True) if not good), None)


def checksum(file: BinaryIO) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    while chunk := file.read(CHUNK):
        value = zlib.crc32(chunk, value)
    return value
