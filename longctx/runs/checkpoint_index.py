"""The JSON of a checkpoint, which says what its files are: read, and held against them.

Needs no torch, so that a command can look before it loads that.
"""

from __future__ import annotations

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
    try:
        written = untrusted.read_json(path / INDEX, INDEX_SIZE, within=path)
        content: dict[str, Any] = written["content"]
        if zlib.crc32(json.dumps(content).encode()) != written["crc32"]:
            raise ValueError("its checksum differs")
        if not content["files"].keys():
            raise ValueError("it names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{INDEX} is not what runs write ({error})") from error
    return content


def verify(path: Path, most: float = float("inf")) -> str | None:
    """The first file of the checkpoint at `path` that is not what was written, None if all are;
    some are read at a time. Raises ValueError as `read`, or for files of over `most` bytes in all.
    """
    files = read(path)["files"]

    def is_whole(name: str) -> bool:
        try:
            file = path / Path(name).name
            untrusted.check_file(file, within=path)
            written = {"bytes": file.stat().st_size, "crc32": checksum(file)}
        except (OSError, ValueError):
            return False
        return bool(files[name] == written)

    if sum(file.stat().st_size for file in path.iterdir()) > most:
        raise ValueError(f"{path}: more than {most:,.0f} bytes")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        intact = list(pool.map(is_whole, files))
    return next((name for name, good in zip(files, intact, strict=True) if not good), None)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value
