"""Checks of files that torch.save wrote, before torch opens them: what a few kilobytes may claim.

Such a file is a zip archive of a pickle and of the bytes of tensors, none of them compressed. Torch
unpacks a compressed pickle of any size, and its weights_only reader calls bytearray(10**11) when
the pickle says so.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

from longctx import untrusted

ENTRIES = 1 << 17  # parts of an archive: a tensor each; 8b with its optimizer has a thousand
PICKLE = 32 << 20  # bytes; that of 8b has 0.2 MiB
# What runs write: tensors and plain values
MODULES = {"torch", "torch._utils", "torch.nn.parameter", "collections"}
OTHERS = {"_codecs encode"}  # bytes
NAMES = {"OrderedDict", "Parameter", "Size", "_rebuild_parameter", "_rebuild_tensor_v2"}


def flaw(path: Path) -> str | None:
    """Say why torch had better not open the file at `path`; None where it can, or where it is no
    archive, which it refuses.

    Raises ValueError, one line, where it is no regular file.
    """
    with untrusted.open_file(path) as file:
        size = file.seek(0, 2)
        try:
            with zipfile.ZipFile(file) as archive:
                return _flaw(archive, size)
        except zipfile.BadZipFile:
            return None
        except (OSError, ValueError, EOFError, LookupError, RuntimeError, NotImplementedError):
            return "damaged, its directory is not what was written"


def _flaw(archive: zipfile.ZipFile, size: int) -> str | None:
    parts = archive.infolist()
    if len(parts) > ENTRIES:
        return f"{len(parts):,} parts, where a checkpoint has {ENTRIES:,} at most"
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        return "compressed, which checkpoints never are"
    if sum(part.file_size for part in parts) > size:
        return f"parts of more bytes than the {size:,} of the file"
    for part in parts:
        if not part.filename.endswith(".pkl"):
            continue
        if part.file_size > PICKLE:
            return f"{part.file_size:,} bytes of plain values, where {PICKLE:,} are the most"
        name = _foreign(archive.read(part))
        if name is not None:
            return f"cannot be read safely, it holds more than tensors and plain values ({name})"
    return None


def _foreign(pickle: bytes) -> str | None:
    """A name in `pickle` that checkpoints do not have; None where there is none."""
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            return opcode.name.lower()
        if opcode.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            is_storage = module == "torch" and name.endswith("Storage")
            is_known = module in MODULES and (name in NAMES or is_storage)
            if not (is_known or argument in OTHERS):
                return f"{module}.{name}"[:80]
    return None
