"""Checkpoints that longctx wrote before it wrote folders: one zip file of torch each."""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from longctx.runs import torch_archive


def read(path: Path) -> Any:
    """What a file of torch holds, its tensors mapped from disk; None if torch cannot open it.

    Raises ValueError where it is no regular file, or holds more than tensors and plain values.
    """
    if what := torch_archive.flaw(path):
        raise ValueError(f"{path}: {what}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: cannot be read safely, it holds more than tensors and plain values"
        ) from error
    except PermissionError:
        raise
    except (RuntimeError, EOFError, KeyError, ValueError, OSError):
        return None


def verify(path: Path) -> str | None:
    """The first part of the file at `path` that is not what was written, None if all are.

    Each part of the zip file has a checksum, which torch does not look at. A file that is no zip
    file at all passes: `read` refuses it. Raises ValueError, which says why, where torch had better
    not open it.
    """
    if what := torch_archive.flaw(path):
        raise ValueError(what)
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip()
    except zipfile.BadZipFile:
        return None
    except PermissionError:
        raise
    except (OSError, RuntimeError, ValueError, EOFError, LookupError, struct.error, zlib.error):
        return "its directory"  # offsets or flags that cannot be
